"""Random shapes, strides, dtypes and options: the public API against the reference within the contract's bound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import BFLOAT16, DTYPES, NEG_INF, assert_same, check, host, normal, wide

import cupyflash
from cupyflash import reference, testing

SHORT = st.one_of(st.integers(0, 20), st.integers(21, 70))
LONG = st.one_of(st.integers(0, 20), st.sampled_from([127, 130, 257, 300, 520]))
LEADS = [(), (), (1,), (2,), (3,), (2, 3), (2, 1, 2)]
SEEDS = st.integers(0, 2**32 - 1)


def examples(count):
    """Settings of a property test: bounded in number, new examples in each run."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )


@st.composite
def broadcastable(draw, shape):
    """A shape that broadcasts to ``shape``: axes left out in front, others of length one."""
    shape = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape)


@st.composite
def shapes(draw, lengths):
    """Sizes of one call and the leading axes of q, k and v, which broadcast to ``lead``."""
    lead = draw(st.sampled_from(LEADS[:4] if lengths is LONG else LEADS))
    heads_kv = draw(st.integers(1, 1 if lengths is LONG else 3))
    leads = [draw(broadcastable(lead)) for _ in range(3)]
    leads[draw(st.integers(0, 2))] = lead
    return {
        "lead": lead,
        "leads": leads,
        "heads_q": heads_kv * draw(st.integers(1, 3)),
        "heads_kv": heads_kv,
        "m": draw(lengths),
        "n": draw(lengths),
        "d": draw(st.integers(1, 20)),
        "e": draw(st.integers(1, 20)),
    }


@st.composite
def options(draw, sizes):
    """Options in words; arrays as ("name", shape, ...) for `build`."""
    lead, heads, m, n = sizes["lead"], (*sizes["lead"], sizes["heads_q"]), sizes["m"], sizes["n"]
    chosen = draw(st.sets(st.sampled_from(sorted(OPTION_MAKERS)), max_size=len(OPTION_MAKERS)))
    made = {}
    for name in sorted(chosen):
        made |= OPTION_MAKERS[name](draw, lead, heads, m, n)
    speaks_of_positions = made.get("causal") is True or "window" in made or "alibi_slopes" in made
    if speaks_of_positions and not isinstance(made.get("causal"), str):
        made["query_offset"] = draw(st.one_of(st.integers(-n - 3, n + 3), offsets(lead)))
    return made


def offsets(lead):
    return broadcastable(lead).map(lambda shape: ("integers", shape, -5, 25))


def lengths(draw, lead, limit):
    return draw(
        st.one_of(st.integers(0, limit), broadcastable(lead).map(lambda shape: ("integers", shape, 0, limit)))
    )


def floats(kind):
    return lambda draw, shape: (kind, draw(broadcastable(shape)), draw(st.sampled_from(DTYPES)))


def dropout(draw, lead, heads, m, n):
    return {
        "dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])),
        "dropout_seed": draw(st.integers(0, 2**64 - 1)),
        "dropout_offset": draw(st.integers(0, 2**32 - 1)),
        "dropout_origin": tuple(draw(st.integers(0, 100)) for _ in range(3)),
    }


BOUNDS = st.one_of(st.none(), st.integers(0, 30))
OPTION_MAKERS = {
    "scale": lambda draw, lead, heads, m, n: {"scale": draw(st.sampled_from([0.0, -0.5, 0.1, 1.0]))},
    "causal": lambda draw, lead, heads, m, n: {
        "causal": draw(st.sampled_from([True, "top_left", "bottom_right"]))
    },
    "window": lambda draw, lead, heads, m, n: {"window": (draw(BOUNDS), draw(BOUNDS))},
    "softcap": lambda draw, lead, heads, m, n: {"softcap": draw(st.sampled_from([0.7, 5.0, 30.0]))},
    "mask": lambda draw, lead, heads, m, n: {"mask": ("mask", draw(broadcastable((*heads, m, n))))},
    "bias": lambda draw, lead, heads, m, n: {"bias": floats("bias")(draw, (*heads, m, n))},
    "sinks": lambda draw, lead, heads, m, n: {"sinks": floats("normal")(draw, heads)},
    "alibi_slopes": lambda draw, lead, heads, m, n: {"alibi_slopes": floats("slopes")(draw, heads)},
    "q_lengths": lambda draw, lead, heads, m, n: {"q_lengths": lengths(draw, lead, m)},
    "kv_lengths": lambda draw, lead, heads, m, n: {"kv_lengths": lengths(draw, lead, n)},
    "dropout": dropout,
}


@st.composite
def calls(draw, lengths=SHORT):
    """One call of attention: sizes, options, dtype, memory layouts and the seed of its numbers."""
    sizes = draw(shapes(lengths))
    return {
        "sizes": sizes,
        "options": draw(options(sizes)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layouts": [draw(st.sampled_from(testing.LAYOUTS)) for _ in range(3)],
        "spread": draw(st.sampled_from([0.3, 1.0, 3.0])),
        "seed": draw(SEEDS),
    }


def build(xp, call):
    """(q, k, v), options as arrays of ``xp``."""
    rng = np.random.default_rng(call["seed"])
    sizes, dtype = call["sizes"], call["dtype"]
    tails = [
        (sizes["heads_q"], sizes["m"], sizes["d"]),
        (sizes["heads_kv"], sizes["n"], sizes["d"]),
        (sizes["heads_kv"], sizes["n"], sizes["e"]),
    ]
    operands = []
    for lead, tail, layout, spread in zip(sizes["leads"], tails, call["layouts"], (call["spread"], 1, 1)):
        values = spread * rng.standard_normal((*lead, *tail))
        operands.append(testing.lay_out(xp.asarray(values.astype(dtype)), layout))
    made = {name: option(xp, rng, x) for name, x in call["options"].items()}
    return tuple(operands), made


def option(xp, rng, x):
    """An option's array for its description; anything else is itself."""
    if not (isinstance(x, tuple) and x and isinstance(x[0], str)):
        return x
    kind, shape, *rest = x
    if kind == "integers":
        return xp.asarray(rng.integers(rest[0], rest[1] + 1, shape))
    if kind == "mask":
        return xp.asarray(rng.random(shape) < 0.7)
    values = rng.standard_normal(shape) * (0.1 if kind == "slopes" else 1)
    if kind == "bias":
        values = np.where(rng.random(shape) < 0.1, NEG_INF, values)
    return xp.asarray(np.asarray(values).astype(rest[0]))


@pytest.fixture(params=["stacked", "one by one"])
def small_tiles(request, monkeypatch, xp):
    """Small tiles on the CPU, which put many of their borders into small problems."""
    if xp is not np:
        pytest.skip("a kernel's tile sizes are compiled in")
    monkeypatch.setattr("cupyflash.cpu.tiles._KEPT_QUERIES", 24)
    monkeypatch.setattr("cupyflash.cpu.tiles._KEPT_KEYS", 16)
    monkeypatch.setattr("cupyflash.cpu.tiles._MOVED_BYTES", 64)
    if request.param == "one by one":
        monkeypatch.setattr("cupyflash.cpu.tiles._TILE_BYTES", 4)


@examples(30)
@given(call=calls(LONG))
def test_forward_and_gradients_match_the_reference(xp, call):
    operands, made = build(xp, call)
    check(*operands, **made)


@pytest.mark.usefixtures("small_tiles")
@examples(80)
@given(call=calls())
def test_any_tile_sizes_match_the_reference(xp, call):
    operands, made = build(xp, call)
    check(*operands, **made)


@pytest.mark.usefixtures("small_tiles")
@examples(30)
@given(call=calls(), layouts=st.lists(st.sampled_from(testing.LAYOUTS), min_size=3, max_size=3))
def test_bits_do_not_depend_on_layout(xp, call, layouts):
    operands, made = build(xp, call)
    moved = [testing.lay_out(x, layout) for x, layout in zip(operands, layouts)]
    results = []
    for q, k, v in (operands, moved):
        result, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **made)
        results.append((*result, *vjp(result[0])))
    assert_same(*results)


@examples(40)
@given(call=calls(), item=st.integers(0, 2))
def test_bits_do_not_depend_on_the_batch_beside(xp, call, item):
    """A batch item alone gives the bits that it has among others."""
    call["sizes"] |= {"lead": (3,), "leads": [(3,)] * 3}
    plain_options = ("scale", "causal", "window", "softcap", "query_offset")
    call["options"] = {name: x for name, x in call["options"].items() if name in plain_options}
    if not isinstance(call["options"].get("causal"), str):
        call["options"]["query_offset"] = 1
    operands, made = build(xp, call)
    whole = host(cupyflash.attention(*operands, return_lse=True, **made))
    alone = host(cupyflash.attention(*(x[item] for x in operands), return_lse=True, **made))
    assert_same(tuple(x[item] for x in whole), alone)


@examples(30)
@given(
    m=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 90), max_size=4),
    seed=SEEDS,
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.4]),
)
def test_any_cut_of_the_keys_merges_to_the_whole(xp, m, cuts, seed, dtype, causal, p):
    """Forward by merge, backward by shares that add up, with positions and dropout of the whole."""
    n = 90
    q, k, v, dout = (
        normal(xp, shape, dtype, [seed, part])
        for part, shape in enumerate([(2, m, 6), (1, n, 6), (1, n, 5), (2, m, 5)])
    )
    whole = {"causal": causal, "query_offset": n - m, "dropout_p": p, "dropout_seed": 3}
    edges = [0, *sorted(cuts), n]
    pieces = []
    for a, b in pairwise(edges):
        pieces.append(
            ((k[:, a:b], v[:, a:b]), whole | {"query_offset": n - m - a, "dropout_origin": (0, 0, a)})
        )
    parts = [cupyflash.attention(q, *kv, return_lse=True, **part) for kv, part in pieces]
    out, lse = cupyflash.merge(*parts)
    exact = reference.attention(q, k, v, return_lse=True, **whole)
    unit = {2: 0.02 if dtype == BFLOAT16 else 2e-3, 4: 5e-6, 8: 1e-13}[dtype.itemsize]
    np.testing.assert_allclose(wide(out), wide(exact[0]), rtol=unit, atol=2 * unit)
    np.testing.assert_allclose(wide(lse), wide(exact[1]), rtol=0, atol=1e-5 if dtype.itemsize < 8 else 1e-12)
    shares = [host(cupyflash.attention_backward(dout, q, *kv, out, lse, **part)) for kv, part in pieces]
    gradients = reference.attention_backward(dout, q, k, v, **whole)
    totals = (
        sum(wide(share.q) for share in shares),
        np.concatenate([wide(share.k) for share in shares], axis=-2),
        np.concatenate([wide(share.v) for share in shares], axis=-2),
    )
    for total, value in zip(totals, gradients):
        largest = max(1.0, abs(wide(value)).max())
        np.testing.assert_allclose(total, wide(value), rtol=0, atol=4 * unit * largest)
