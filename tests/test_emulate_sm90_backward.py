"""The Hopper family's backward on a CPU: options, layouts of mask and bias, a bias's gradient, lengths and groups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulated import needs_compiler, vjp_on
from support import DTYPES, NEG_INF, assert_same, check, cotangents, normal, qkv, same_bits

from cupyflash import Gradients
from cupyflash.cuda import families
from cupyflash.cuda.emulate import Machine

pytestmark = needs_compiler

BFLOAT16 = DTYPES[1]
M, N = 100, 230
_RANDOM = np.random.default_rng(1)
MASK = _RANDOM.random((M, N)) < 0.7
BIAS = np.where(_RANDOM.random((2, M, N)) < 0.1, NEG_INF, _RANDOM.standard_normal((2, M, N)))
OPTIONS = {
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS.astype(BFLOAT16)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": np.float32([0.3, 0.01]), "query_offset": 90},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
    "sinks": {"sinks": np.float32([2, -1])},
}
PAIRS = [(), *itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2)]
NARROW, WIDE = ["row_stats", "backward"], ["row_stats", "backward_kv", "backward_q"]
KERNELS = {64: NARROW, 128: NARROW, 256: WIDE}
DIMS = [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]


def run(d, *, mode="plain", lead=1, wrt=("q", "k", "v"), n=N, dtype=BFLOAT16, **options):
    """The kernels of the backward, whose gradients are those of the reference."""
    machine = Machine(mode, compute_capability=90)
    check(*qkv(np, lead, 2, M, n, d, heads_kv=1, dtype=dtype), via=vjp_on(machine), wrt=wrt, **options)
    return [config.kernel for config in machine.launched if config.kernel != "forward"]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
@pytest.mark.parametrize("d", DIMS)
def test_options_and_pairs(d, names):
    kernels = run(d, **{key: value for name in names for key, value in OPTIONS[name].items()})
    assert kernels == KERNELS[d]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_races(d):
    wide = normal(np, (2, M, N), np.float32, 4)
    for options in ({"bias": BIAS.astype(BFLOAT16), "mask": MASK}, {"bias": wide, "mask": MASK}):
        run(d, mode="checked", wrt=("q", "k", "v", "bias"), **options)


@pytest.mark.parametrize("d", DIMS)
def test_masks_and_biases_that_repeat_and_other_layouts(d):
    wide = normal(np, (2, M, N), np.float32, 5)
    forms = [
        {"mask": MASK[:, :1], "bias": wide},
        {"mask": np.where(MASK, 128, 0).astype(np.uint8).view(bool), "bias": BIAS[:, :, :1].astype(BFLOAT16)},
        {"mask": MASK[:1], "bias": wide[:, :, :1]},
        {"bias": BIAS[:, :1].astype(BFLOAT16)},
        {"bias": wide[:1, :1, :1].astype(np.float64)},
        {"bias": wide.astype(np.float64), "mask": MASK[::-1, ::-1]},
        {"bias": np.pad(wide, ((0, 0), (0, 0), (0, 2)))[..., :N]},
        {"bias": wide.astype(np.float16)[:, ::-1, ::-1], "kv_lengths": np.array([N - 9])},
    ]
    for options in forms:
        run(d, **options)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32], ids=["16 bits", "float32"])
@pytest.mark.parametrize("n", [N - 2, N])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left", "mask": True},
        {"window": (20, 10), "query_offset": 5},
        {"q_lengths": [50, 80], "kv_lengths": [0, 200], "dropout_p": 0.3, "dropout_seed": 4},
    ],
    ids=["all", "causal", "window", "lengths"],
)
def test_the_gradient_of_a_bias_that_was_not_broadcast_leaves_the_main_kernel(d, dtype, n, options):
    lengths = {name: np.array(x) for name, x in options.items() if name.endswith("lengths")}
    mask = {"mask": MASK[:, :n]} if "mask" in options else {}
    bias = normal(np, (2, 2, M, n), dtype, 6)
    kernels = run(d, lead=2, n=n, wrt=("q", "k", "v", "bias"), **{**options, **lengths, **mask, "bias": bias})
    assert kernels == KERNELS[d]


def test_other_gradients_of_a_bias_have_a_kernel_of_their_own():
    bias = normal(np, (2, M, N), BFLOAT16, 6)
    for options in ({"lead": 2}, {"softcap": 2.0}, {"wrt": ("bias",)}):
        kernels = run(64, **{"wrt": ("v", "bias"), **options, "bias": bias})
        assert "backward_bias" in kernels, options


def test_what_a_mask_hides_from_a_bias_may_be_anything():
    q, k, v = qkv(np, 1, 2, M, N, 64, dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=90)
    out, lse = machine.attention(q, k, v, mask=MASK, bias=BIAS.astype(BFLOAT16))
    dout, _ = cotangents(np, out, lse)
    results = []
    for hidden in (0.0, np.nan, np.inf):
        bias = np.where(MASK, BIAS, hidden).astype(BFLOAT16)
        gradients = machine.attention_backward(dout, q, k, v, out, lse, mask=MASK, bias=bias)
        results.append(tuple(x for x in gradients if x is not None))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("d", [64, 256])
def test_what_lies_past_lengths_in_a_bias_is_never_seen(d):
    q, k, v = qkv(np, 1, 2, M, N, d, dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=90)
    lengths = {"q_lengths": np.array([70]), "kv_lengths": np.array([200])}
    bias, results = normal(np, (1, 2, M, N), BFLOAT16, 8), []
    out, lse = machine.attention(q, k, v, bias=bias, **lengths)
    dout, _ = cotangents(np, out, lse)
    for _ in range(2):
        gradients = machine.attention_backward(dout, q, k, v, out, lse, bias=bias, **lengths)
        results.append(tuple(x for x in gradients if x is not None))
        bias[..., 70:, :] = bias[..., 200:] = np.nan
    assert_same(results[1], results[0])


def test_sums_in_no_order():
    run(64, deterministic=False, **OPTIONS["bias"])


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turn", "any order"])
@pytest.mark.parametrize(
    ("dims", "shape", "options"),
    [
        ((64, 64), (1, 1), {}),
        ((60, 64), (2, 2), {"causal": "top_left"}),
        ((7, 5), (1, 2), {"window": (60, 30), "query_offset": 20}),
        ((64, 40), (3, 1), {"q_lengths": [170, 0, 65], "kv_lengths": [0, 200, 129]}),
    ],
    ids=["one head", "groups", "window", "lengths"],
)
def test_gradients_of_queries_leave_the_main_kernel(dims, shape, options, deterministic):
    """Of every layout; rows that see no key get zeros."""
    lead, group = shape
    lengths = {name: np.array(x) for name, x in options.items() if name.endswith("lengths")}
    q, k, v = qkv(np, lead, 2 * group, 170, 200, *dims, heads_kv=2, dtype=BFLOAT16)
    # All warpgroups of the forward write zeros past a length: no race that matters.
    machine = Machine("plain" if lengths else "checked", compute_capability=90)
    options = {**options, **lengths, "deterministic": deterministic}
    check(q, k, v, via=vjp_on(machine), wrt=("q", "k", "v"), **options)
    assert [config.kernel for config in machine.launched] == ["forward", *NARROW]


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turn", "any order"])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_queries_of_many_rows(d, deterministic):
    """Several units of rows a head, the last of them not whole; the first rows see no key, or blocks begin apart."""
    machine = Machine("checked", compute_capability=90)
    q, k, v = qkv(np, 1, 2, 600, 150, d, heads_kv=1, dtype=BFLOAT16)
    unseen = {"causal": "bottom_right"}, {"window": (70, 20), "query_offset": -200}
    for options in (*unseen, {}, {"dropout_p": 0.2, "dropout_seed": 3}):
        check(q, k, v, via=vjp_on(machine), wrt=("q", "k", "v"), deterministic=deterministic, **options)


def test_in_any_order_blocks_begin_apart_where_there_is_no_bound_to_the_right():
    q, k, v = qkv(np, 1, 1, 300, 300, 64, dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=90)
    for causal, apart in (("top_left", False), (False, True)):
        out, lse = machine.attention(q, k, v, causal=causal)
        dout, _ = cotangents(np, out, lse)
        values = [
            machine.attention_backward(dout, q, k, v, out, lse, causal=causal, deterministic=order).v
            for order in (True, False)
        ]
        assert same_bits(*(x[:, :, :128] for x in values))  # the first block begins with the last queries
        assert same_bits(*values) is not apart


@pytest.mark.parametrize("d", [64, 128])
def test_rows_past_their_length_may_be_anything_where_blocks_begin_apart(d):
    q, k, v = qkv(np, 1, 2, 300, 300, d, dtype=BFLOAT16)
    machine, results = Machine("plain", compute_capability=90), []
    options = {"q_lengths": np.array([270]), "deterministic": False}
    dout, _ = cotangents(np, *machine.attention(q, k, v, **options))
    for poison in (0.0, np.nan):
        q[:, :, 270:] = dout[:, :, 270:] = poison
        out, lse = machine.attention(q, k, v, **options)
        gradients = machine.attention_backward(dout, q, k, v, out, lse, wrt=("q", "k", "v"), **options)
        results.append(tuple(x for x in gradients if x is not None))
    assert_same(results[1], results[0])


def test_gradients_of_queries_into_arrays_of_every_layout():
    q, k, v = qkv(np, 2, 2, 170, 200, 64, dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=90)
    out, lse = machine.attention(q, k, v)
    dout, _ = cotangents(np, out, lse)
    [expected] = [x for x in machine.attention_backward(dout, q, k, v, out, lse, wrt="q") if x is not None]
    frame = np.zeros((2, 172, 2, 130), BFLOAT16)
    backwards, odd = np.empty_like(q)[..., ::-1, ::-1], frame[:, 1:171, :, 1:65].swapaxes(1, 2)
    for target in (np.empty_like(q), np.empty_like(q.swapaxes(1, 2)).swapaxes(1, 2), backwards, odd):
        targets = Gradients(q=target)
        machine.attention_backward(dout, q, k, v, out, lse, wrt="q", grads_out=targets)
        assert_same(target, expected)
    assert machine.launched[-1].kernel == "backward"
    odd[...] = 0
    assert not frame.any()  # nothing around it was written
    machine.attention_backward(dout, q, k, v, out, lse, wrt="q", grads_out=Gradients(q=odd), accumulate=True)
    assert machine.launched[-1].kernel == "finish_queries"
    assert_same(np.ascontiguousarray(odd), expected)


def test_queries_of_narrow_heads_that_items_share():
    q, _, _ = qkv(np, 1, 2, 140, 1, 64, dtype=BFLOAT16)
    _, k, v = qkv(np, 3, 2, 1, 150, 64, dtype=BFLOAT16)
    machine = Machine("plain", compute_capability=90)
    check(q, k, v, via=vjp_on(machine), kv_lengths=np.array([150, 0, 60]))
    assert machine.launched[-1].kernel == "finish_queries"


def test_keys_of_narrow_heads_that_items_share():
    _, k, v = qkv(np, 1, 2, 1, 200, 64, dtype=BFLOAT16)
    q, _, _ = qkv(np, 3, 4, 140, 1, 64, dtype=BFLOAT16)
    for causal in (False, "top_left"):
        machine = Machine("plain", compute_capability=90)
        check(q, k, v, via=vjp_on(machine), q_lengths=np.array([140, 0, 60]), causal=causal)
        assert machine.launched[-1].kernel == "backward"


# Wide heads, whose keys and queries have kernels of their own.


def run_wide(q, k, v, *, mode="plain", **options):
    machine = Machine(mode, compute_capability=90)
    check(q, k, v, via=vjp_on(machine), **options)
    kernels = [config.kernel for config in machine.launched if config.family == "sm90"]
    assert kernels[:3] == ["forward", "backward_kv", "backward_q"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"window": (40, 20), "query_offset": 30},
        {"dropout_p": 0.3, "dropout_seed": 3, "dropout_origin": (5, 3, 0)},
        {"mask": MASK, "bias": BIAS, "softcap": 5.0, "dropout_p": 0.1, "dropout_seed": 3},
    ],
    ids=["plain", "causal", "window", "shard", "all"],
)
def test_wide_heads(options):
    run_wide(*qkv(np, 1, 2, M, N, 256, dtype=BFLOAT16), **options)


def test_no_races_in_192_columns():
    run_wide(*qkv(np, 1, 2, 140, 200, 192, dtype=BFLOAT16), mode="checked")


def test_groups_and_lengths():
    q, k, v = qkv(np, 2, 4, 200, 260, 256, heads_kv=2, dtype=BFLOAT16)
    run_wide(q, k, v, q_lengths=np.array([200, 77]), kv_lengths=np.array([150, 260]))


def test_rows_of_very_small_and_very_large_lse():
    q, k, v = qkv(np, 1, 2, 100, 130, 256, dtype=BFLOAT16)
    for level in (-3000.0, 3000.0):
        run_wide(q, k, v, bias=np.full((1, 130), level, np.float32))


def test_queries_that_items_share():
    q, _, _ = qkv(np, 1, 2, 140, 1, 256, dtype=BFLOAT16)
    _, k, v = qkv(np, 3, 2, 1, 150, 256, dtype=BFLOAT16)
    run_wide(q, k, v, kv_lengths=np.array([150, 0, 60]))


@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "bias"])
def test_queries_that_items_share_up_to_lengths(shaped):
    """What lies past the length of one item is not seen where another one has that query."""
    q, _, _ = qkv(np, 1, 1, 64, 1, 256, dtype=BFLOAT16)
    _, k, v = qkv(np, 2, 1, 1, 64, 256, dtype=BFLOAT16)
    options = {"bias": normal(np, (2, 1, 64, 64), BFLOAT16, 6)} if shaped else {}
    machine, results = Machine("plain", compute_capability=90), []
    dout = normal(np, (2, 1, 64, 256), BFLOAT16, 7)
    for poison in (0.0, np.nan):
        for x in (dout, *options.values()):
            x[1, :, 20:] = poison
        way = vjp_on(machine)
        (out, lse), vjp = way(
            q, k, v, return_lse=True, wrt=("q", "k", "v"), q_lengths=np.array([64, 20]), **options
        )
        results.append((out, lse, *vjp(dout, None)[:3]))
    assert machine.launched[-1].kernel == "backward_q"
    assert np.isfinite(results[0][2].astype(np.float32)).all()
    assert_same(results[1], results[0])


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize(
    "options", [{"causal": True, "query_offset": -4}, {"mask": MASK & (np.arange(M) > 3)[:, None]}]
)
def test_an_infinite_dlse_of_rows_that_see_nothing(d, options):
    """As d(lse^2) is there."""
    q, k, v = qkv(np, 1, 1, M, N, d, dtype=BFLOAT16)
    dlse = normal(np, (1, 1, M), np.float32, 8)
    dlse[..., :4] = -np.inf
    machine = Machine("plain", compute_capability=90)
    check(q, k, v, via=vjp_on(machine), wrt=("q", "k", "v"), dlse=dlse, **options)
    assert "row_stats" in {config.kernel for config in machine.launched}


@pytest.mark.parametrize("d", [64, 256])
def test_a_bias_of_2_to_the_31_bytes_a_row(monkeypatch, d):
    """Its rows overlap in memory, and so do those of k and v."""
    monkeypatch.setattr(families, "FORCED", "sm90")
    q, k, v = qkv(np, 1, 1, M, 1, d, dtype=BFLOAT16)
    numbers = np.zeros(2**30 + 8 * M, BFLOAT16)
    numbers[: 2 * 2**10] = normal(np, 2 * 2**10, BFLOAT16, 9)
    dout, results = normal(np, (1, 1, M, d), BFLOAT16, 7), []
    for n in (2**10, 2**30):
        bias = np.lib.stride_tricks.as_strided(numbers, (M, n), (16, 2))
        options = {"bias": bias, "window": (50, 0), "query_offset": 60}
        keys, values = (np.broadcast_to(x, (1, 1, n, d)) for x in (k, v))
        way = vjp_on(Machine("plain", compute_capability=90))
        wrt = ("q",) if d == 256 else ()  # other gradients are as large as k
        (out, lse), vjp = way(q, keys, values, return_lse=True, wrt=wrt, **options)
        results.append((out, lse, *(vjp(dout, None)[:1] if wrt else ())))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(
    "options", [{"causal": True, "query_offset": 60}, {"mask": MASK}, {"mask": MASK, "softcap": 2.0}]
)
def test_an_infinite_dlse_reaches_no_key_that_its_row_does_not_see(d, options):
    q, k, v = qkv(np, 1, 1, M, N, d, dtype=BFLOAT16)
    dlse = normal(np, (1, 1, M), np.float32, 8)
    dlse[..., 5] = np.inf
    machine = Machine("plain", compute_capability=90)
    check(q, k, v, via=vjp_on(machine), wrt=("q", "k", "v"), dlse=dlse, **options)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("p", [0.0, 0.6])
def test_narrow_heads_in_turn(d, p):
    """Blocks of several key tiles; dropout of more than half inverts its bits."""
    machine = Machine("plain", compute_capability=90)
    dropout = {"dropout_p": p, "dropout_seed": 7} if p else {}
    lengths = {"q_lengths": np.array([170, 30]), "kv_lengths": np.array([100, 200])}
    check(*qkv(np, 2, 2, 170, 200, d, heads_kv=1, dtype=BFLOAT16), via=vjp_on(machine), **lengths, **dropout)
    assert [config.kernel for config in machine.launched if config.family == "sm90"] == [
        "forward",
        "backward",
    ]
