"""The Hopper backward on its GPU: tiles' edges, poisoned memory, many tiles and few, the same bits in every run."""

from __future__ import annotations

import numpy as np
import pytest
from support import DTYPES, NEG_INF, assert_same, check, cotangents, host, normal, qkv, wide

import cupyflash
from cupyflash import Gradients
from cupyflash.cuda import families

pytestmark = pytest.mark.gpu

BFLOAT16 = DTYPES[1]
DIMS = (64, 128, 256)
TILES = {64: (128, 128), 128: (64, 128), 256: (64, 64)}


@pytest.fixture(autouse=True)
def hopper(cupy):
    if cupyflash.cuda.device.compute_capability(cupy.cuda.runtime.getDevice()) != 90:
        pytest.skip("needs compute capability 9.0")


def edges(tile):
    return sorted({n + step for n in (1, 16, tile, 2 * tile) for step in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("d", DIMS)
def test_lengths_around_the_edges_of_tiles(cupy, d):
    block_q, block_kv = TILES[d]
    for m in edges(block_q):
        check(*qkv(cupy, 1, 2, m, 150, d, dtype=BFLOAT16, seed=m), causal="bottom_right")
    for n in edges(block_kv):
        check(*qkv(cupy, 1, 2, 100, n, d, dtype=BFLOAT16, seed=n), causal="bottom_right")


FORMS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (60, 20), "query_offset": 3},
    "mask": {"mask": (2, 1, 170, 230)},
    "bias": {"bias": (4, 170, 230)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": (4,), "query_offset": 2},
    "sinks": {"sinks": (4,)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "shard": {"dropout_p": 0.3, "dropout_seed": 5, "dropout_origin": (3, 5, 11)},
    "all": {
        **{
            "mask": (2, 1, 170, 230),
            "bias": (4, 170, 230),
            "softcap": 2.0,
            "alibi_slopes": (4,),
            "sinks": (4,),
        },
        **{"dropout_p": 0.3, "dropout_seed": 5, "causal": "bottom_right", "kv_lengths": [230, 100]},
    },
}


def options_of(cupy, form):
    made = dict(FORMS[form])
    for name in ("bias", "alibi_slopes", "sinks"):
        if name in made:
            made[name] = normal(cupy, made[name], seed=7)
    if "mask" in made:
        made["mask"] = normal(cupy, made["mask"], seed=8) > -1
    return made


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (256, 256), (40, 72), (192, 128)])
def test_options_and_head_dims(cupy, dtype, form, d, e):
    check(*qkv(cupy, 2, 4, 170, 230, d, e, heads_kv=2, dtype=dtype), **options_of(cupy, form))


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("form", ["plain", "causal", "window"])
def test_more_tiles_than_blocks_and_an_odd_number(cupy, d, form):
    q, k, v = qkv(cupy, 3, 91, 130, 150, d, heads_kv=13 if form == "window" else 91, dtype=BFLOAT16)
    check(q, k, v, **FORMS[form])


@pytest.mark.parametrize("d", DIMS)
def test_what_lies_past_lengths_is_never_seen(cupy, d):
    q, k, v = qkv(cupy, 5, 4, 300, 500, d, heads_kv=2, dtype=BFLOAT16)
    q_lengths, kv_lengths = [300, 0, 17, 200, 64], [500, 0, 1, 97, 400]
    out, lse = cupyflash.attention(q, k, v, q_lengths=q_lengths, kv_lengths=kv_lengths, return_lse=True)
    dout, dlse = cotangents(cupy, out, lse)
    common = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    clean = host(cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **common))
    for item, (m, n) in enumerate(zip(q_lengths, kv_lengths)):
        for x in (k, v):
            x[item, :, n:] = np.nan
        for x in (q, dout, out):
            x[item, :, m:] = np.nan
        dlse[item, :, m:] = np.nan
    found = host(cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **common))
    assert_same(tuple(found), tuple(clean))
    for item, (m, n) in enumerate(zip(q_lengths, kv_lengths)):
        assert not wide(found.q[item, :, m:]).any()
        assert not wide(found.k[item, :, n:]).any()
        assert not wide(found.v[item, :, n:]).any()


@pytest.mark.parametrize("d", DIMS)
def test_nothing_is_read_that_was_not_written(cupy, d):
    """Results and workspace full of NaN before; a workspace of exactly the planned size."""
    q, k, v = qkv(cupy, 2, 3, 333, 444, d, dtype=BFLOAT16)
    options = {"window": (50, 10), "query_offset": 200}  # some rows and keys see nothing
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout, dlse = cotangents(cupy, out, lse)
    expected = host(cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))
    need = cupyflash.plan(q, k, v, backward=True, **options).workspace_bytes
    for _ in range(3):
        workspace = cupy.full(need, 0xFF, cupy.uint8)
        targets = Gradients(*(cupy.full(x.shape, np.nan, np.float32).astype(x.dtype) for x in (q, k, v)))
        cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, grads_out=targets, workspace=workspace, **options
        )
        assert_same(tuple(host(targets)), tuple(expected))


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_thirty_runs_over_many_key_tiles_give_the_same_bits(cupy, d, causal):
    q, k, v = qkv(cupy, 2, 12, 2100, 2100, d, heads_kv=6, dtype=BFLOAT16)
    out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    dout, _ = cotangents(cupy, out, lse)
    first = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
    for run in range(29):
        again = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
        for name, a, b in zip("qkv", again, first):
            same = (a.view(np.uint16) == b.view(np.uint16)).all()
            assert bool(same), f"run {run} differs in the gradient of {name}"


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("form", ["plain", "causal"])
def test_sums_in_no_order_are_as_exact(cupy, d, form):
    check(*qkv(cupy, 2, 4, 500, 700, d, heads_kv=2, dtype=BFLOAT16), deterministic=False, **FORMS[form])


@pytest.mark.parametrize("d", DIMS)
def test_rows_of_very_small_and_very_large_lse(cupy, d):
    q, k, v = qkv(cupy, 1, 2, 200, 260, d, dtype=BFLOAT16)
    for level in (-200.0, -3000.0, 3000.0):
        check(q, k, v, bias=cupy.full((1, 260), level, np.float32))
    x = cupy.full((1, 1, 300, d), 133120.0, np.float32).astype(BFLOAT16)
    out, lse = cupyflash.attention(x, x, v[:, :1, :1].repeat(300, 2), return_lse=True)
    dout, _ = cotangents(cupy, out, lse)
    gradients = cupyflash.attention_backward(dout, x, x, v[:, :1, :1].repeat(300, 2), out, lse)
    assert all(np.isfinite(wide(g)).all() for g in gradients[:3])


@pytest.mark.parametrize("d", DIMS)
def test_rows_that_see_nothing_have_no_gradient(cupy, d):
    q, k, v = qkv(cupy, 1, 2, 200, 260, d, dtype=BFLOAT16)
    mask = cupy.ones((200, 260), bool)
    mask[40:70] = False
    mask[:, 100:130] = False
    _, _, gradients = check(q, k, v, mask=mask)
    assert not wide(gradients.q[:, :, 40:70]).any()
    assert not wide(gradients.k[:, :, 100:130]).any()
    assert not wide(gradients.v[:, :, 100:130]).any()
    bias = cupy.zeros((200, 260), np.float32)
    bias[3] = NEG_INF
    check(q, k, v, bias=bias, sinks=cupy.zeros(2, np.float32))


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("kv_lead", [(1, 1), (3, 1), (1, 2)])
def test_keys_broadcast_over_leading_axes(cupy, d, kv_lead):
    q = normal(cupy, (3, 2, 4, 90, d), BFLOAT16, 1)
    k = normal(cupy, (*kv_lead, 2, 140, d), BFLOAT16, 2)
    v = normal(cupy, (3, 1, 2, 140, d), BFLOAT16, 3)
    check(q, k, v, kv_lengths=cupy.asarray([[140, 20], [100, 0], [7, 128]]))


@pytest.mark.parametrize("d", DIMS)
def test_a_query_broadcast_over_leading_axes(cupy, d):
    q = normal(cupy, (1, 4, 90, d), BFLOAT16, 1)
    k, v = (normal(cupy, (3, 2, 140, d), BFLOAT16, seed) for seed in (2, 3))
    check(q, k, v, kv_lengths=[140, 0, 50])


@pytest.mark.parametrize("d", DIMS)
def test_any_layout_in_and_out(cupy, d):
    q, k, v = qkv(cupy, 2, 4, 100, 130, d, heads_kv=2, dtype=BFLOAT16)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dout, _ = cotangents(cupy, out, lse)
    expected = host(cupyflash.attention_backward(dout, q, k, v, out, lse))

    def turned(x):
        return cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)

    arrays = [turned(x) for x in (dout, q, k, v)]
    assert_same(tuple(host(cupyflash.attention_backward(*arrays, turned(out), lse))), tuple(expected))
    backwards = [cupy.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (dout, q, k, v)]
    assert_same(tuple(host(cupyflash.attention_backward(*backwards, out, lse))), tuple(expected))
    targets = Gradients(*(cupy.ones((*x.shape[:-1], 2 * d), np.float32)[..., ::2] for x in (q, k, v)))
    cupyflash.attention_backward(dout, q, k, v, out, lse, grads_out=targets, accumulate=True)
    for name, target, narrow in zip("qkv", targets, expected):
        np.testing.assert_allclose(wide(target) - 1, wide(narrow), rtol=5e-3, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("wrt", ["q", "k", "v", ("q", "v"), ("alibi_slopes",), ("k", "sinks")])
@pytest.mark.parametrize("d", DIMS)
def test_each_gradient_alone(cupy, d, wrt):
    q, k, v = qkv(cupy, 2, 4, 100, 300, d, heads_kv=2, dtype=BFLOAT16)
    options = {
        "alibi_slopes": normal(cupy, (4,), seed=4),
        "sinks": normal(cupy, (4,), seed=5),
        "query_offset": 4,
    }
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout, _ = cotangents(cupy, out, lse)
    everything = host(cupyflash.attention_backward(dout, q, k, v, out, lse, **options))
    found = host(cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options))
    for name, x in found._asdict().items():
        assert (x is None) == (name not in (wrt if isinstance(wrt, tuple) else (wrt,)))
        if x is not None:
            assert_same(x, getattr(everything, name), name)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "query_offset": 60}, {"mask": (100, 230)}, {"mask": (100, 230), "softcap": 2.0}],
)
def test_an_infinite_dlse_reaches_no_key_that_its_row_does_not_see(cupy, d, options):
    q, k, v = qkv(cupy, 1, 1, 100, 230, d, dtype=BFLOAT16)
    if "mask" in options:
        options = options | {"mask": normal(cupy, options["mask"], seed=8) > -1}
    dlse = normal(cupy, (1, 1, 100), seed=8)
    dlse[..., 5] = np.inf
    check(q, k, v, dlse=dlse, **options)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=["16 bits", "float32"])
@pytest.mark.parametrize("d", DIMS)
def test_a_bias_of_2_to_the_31_bytes_a_row(cupy, monkeypatch, d, dtype):
    """Its rows overlap in memory, and so do those of k and v."""
    monkeypatch.setattr(families, "FORCED", "sm90")
    many = 2**31 // dtype.itemsize
    q, k, v = qkv(cupy, 1, 1, 100, 1, d, dtype=BFLOAT16)
    numbers = cupy.zeros(many + 2000, dtype)
    numbers[:2000] = normal(cupy, 2000, dtype, 9)
    dout, results = normal(cupy, (1, 1, 100, d), BFLOAT16, 7), []
    for n in (1000, many):
        bias = cupy.lib.stride_tricks.as_strided(numbers, (100, n), (16, dtype.itemsize))
        keys, values = (cupy.broadcast_to(x, (1, 1, n, d)) for x in (k, v))
        options = {"bias": bias, "window": (50, 0), "query_offset": 60}
        out, lse = cupyflash.attention(q, keys, values, return_lse=True, **options)
        found = cupyflash.attention_backward(dout, q, keys, values, out, lse, wrt=("q",), **options)
        results.append((host(out), host(lse), host(found.q)))
    assert_same(results[1], results[0])
