"""reference: against published numbers, the contract's formulas element by element, and central differences."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest

from cupyflash import Gradients, dropout_mask, reference, testing

HERE = Path(__file__).parent / "conformance"
LITERALS = json.loads((HERE / "attention_literals.json").read_text())
INF = math.inf


@pytest.mark.parametrize("case", LITERALS, ids=lambda case: case["name"])
def test_published_literals(case):
    options = {key: case[key] for key in ("scale", "causal", "query_offset") if key in case}
    if "mask" in case:
        options["mask"] = np.array(case["mask"])
    out = reference.attention(*(np.array(case[x]) for x in "qkv"), **options)
    np.testing.assert_allclose(out, case["out"], rtol=0, atol=case["atol"])


def test_onnx_node_tests():
    pytest.importorskip("onnx", reason="needs the onnx package")
    spec = importlib.util.spec_from_file_location("onnx_attention", HERE / "onnx_attention.py")
    onnx_attention = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = onnx_attention  # dataclasses look their module up by name
    spec.loader.exec_module(onnx_attention)
    log = io.StringIO()
    failed = onnx_attention.check(lambda q, k, v, **options: reference.attention(q, k, v, **options), out=log)
    assert not failed, log.getvalue()


def by_element(q, k, v, *, scale=None, softcap=None, bias=None, alibi_slopes=None, mask=None, window=(None, None),
               causal=False, query_offset=0, sinks=None, q_lengths=None, kv_lengths=None, dropout_p=0.0,
               dropout_seed=None, dropout_offset=0, dropout_origin=(0, 0, 0)):  # fmt: skip
    """Contract section 1 written out in Python's floats, one score at a time."""
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (q, k, v))
    heads, m, d = q.shape[-3:]
    n, e, group = k.shape[-2], v.shape[-1], heads // k.shape[-3]
    scores, per_head = (*lead, heads, m, n), (*lead, heads)
    bias = np.broadcast_to(0.0 if bias is None else bias, scores)
    mask = np.broadcast_to(True if mask is None else mask, scores)
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, per_head)
    sinks = np.broadcast_to(-INF if sinks is None else sinks, per_head)
    q_lengths = np.broadcast_to(m if q_lengths is None else q_lengths, lead)
    kv_lengths = np.broadcast_to(n if kv_lengths is None else kv_lengths, lead)
    offsets = np.broadcast_to(query_offset, lead)
    left, right = window
    keep, r = np.ones(scores, bool), 1.0
    if dropout_p:
        keep = dropout_mask(scores, dropout_p, dropout_seed, dropout_offset, dropout_origin)
        T = round((1 - dropout_p) * 65536)
        r = 65536 / T if T else 0.0
    out, lse = np.zeros((*lead, heads, m, e)), np.full((*lead, heads, m), -INF)
    for b in np.ndindex(*lead):
        for h in range(heads):
            for i in range(min(m, q_lengths[b])):
                p, row = i + int(offsets[b]), {}
                for j in range(kv_lengths[b]):
                    seen = (left is None or p - left <= j) and (right is None or j <= p + right)
                    if seen and (not causal or j <= p) and mask[(*b, h, i, j)] and bias[(*b, h, i, j)] > -INF:
                        a = math.fsum(q[(*b, h, i)] * k[(*b, h // group, j)])
                        a *= 1 / math.sqrt(d) if scale is None else scale
                        c = softcap * math.tanh(a / softcap) if softcap else a
                        row[j] = c + bias[(*b, h, i, j)] - slopes[(*b, h)] * abs(p - j)
                top = max([*row.values(), sinks[(*b, h)]])
                if top == -INF:
                    continue
                total = math.fsum(
                    [*(math.exp(s - top) for s in row.values()), math.exp(sinks[(*b, h)] - top)]
                )
                lse[(*b, h, i)] = top + math.log(total)
                for j, s in row.items():
                    if keep[(*b, h, i, j)]:
                        out[(*b, h, i)] += r * math.exp(s - top) / total * v[(*b, h // group, j)]
    return out, lse


def inputs(seed, lead_q=(), lead_k=(), lead_v=(), heads_q=2, heads_kv=1, m=5, n=6, d=3, e=2):
    """q, k, v whose leading axes broadcast, and a generator for the options."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=shape)
        for shape in ((*lead_q, heads_q, m, d), (*lead_k, heads_kv, n, d), (*lead_v, heads_kv, n, e))
    )
    return rng, q, k, v


def cases():
    """(name, q, k, v, options): together every option, alone and with the others."""
    rng, *qkv = inputs(0)
    yield "default", *qkv, {}
    yield "scale", *qkv, {"scale": -0.7}
    yield "scale_zero", *qkv, {"scale": 0}
    yield "softcap", *qkv, {"softcap": 0.8, "scale": 2.0}
    yield "causal", *qkv, {"causal": True, "query_offset": -2}
    yield "window", *qkv, {"window": (1, 0), "query_offset": 1}
    yield "huge_window", *qkv, {"window": (10**30, 0), "query_offset": 1}
    yield "mask", *qkv, {"mask": rng.random((5, 6)) < 0.5}
    yield "scalar_bias", *qkv, {"bias": np.array(0.3)}
    yield "row_bias", *qkv, {"bias": rng.normal(size=(5, 1))}
    bias = rng.normal(size=(1, 5, 6))
    bias[0, 2] = -INF
    bias[0, 3, ::2] = -INF
    yield "bias", *qkv, {"bias": bias}
    yield "sinks", *qkv, {"sinks": rng.normal(size=2), "mask": rng.random((5, 6)) < 0.3}
    yield "one_sink", *qkv, {"sinks": np.array(0.5), "causal": True, "query_offset": -3}
    yield "alibi", *qkv, {"alibi_slopes": np.array([0.5, -0.2]), "query_offset": 2}
    yield "dropout", *qkv, {"dropout_p": 0.4, "dropout_seed": 5}
    yield "dropout_all", *qkv, {"dropout_p": 1.0, "dropout_seed": 5}
    rng, *qkv = inputs(1, (3,), (3,), (3,))
    lengths = {"q_lengths": [5, 0, 3], "kv_lengths": [0, 6, 4]}
    yield "lengths", *qkv, lengths
    yield "lengths_sinks", *qkv, {**lengths, "sinks": rng.normal(size=(3, 2))}
    yield "offsets", *qkv, {"causal": True, "query_offset": np.array([-3, 0, 9])}
    yield "no_keys", *inputs(2, n=0)[1:], {"sinks": np.array([0.1, -INF])}
    yield "no_rows", *inputs(3, m=0)[1:], {}
    yield (
        "no_batch",
        *inputs(3, (0,))[1:],
        {"kv_lengths": np.zeros(0, int), "causal": True, "query_offset": 0},
    )
    yield "no_values", *inputs(4, e=0)[1:], {}
    for seed in range(2):
        rng, *qkv = inputs(5 + seed, (2, 1), (3,), (1, 3), heads_q=4, heads_kv=2, m=4 + seed, n=7 - seed)
        everything = {
            "scale": 0.9,
            "softcap": 1.5,
            "window": (3, 2),
            "query_offset": rng.integers(-2, 3, size=(2, 1)),
            "mask": rng.random((2, 1, 1, 4 + seed, 7 - seed)) < 0.8,
            "bias": rng.normal(size=(3, 4, 1, 7 - seed)),
            "sinks": rng.normal(size=(3, 1)),
            "alibi_slopes": rng.normal(size=(2, 1, 4)),
            "q_lengths": rng.integers(2, 5, size=3),
            "kv_lengths": rng.integers(2, 6, size=(2, 3)),
            "dropout_p": 0.3,
            "dropout_seed": 2**63 + seed,
            "dropout_offset": 3,
            "dropout_origin": (7, 100, 2**30),
        }
        yield f"everything_{seed}", *qkv, everything


CASES = {name: case for name, *case in cases()}
by_name = pytest.mark.parametrize("name", CASES)


@by_name
def test_forward_is_the_formula(name):
    q, k, v, options = CASES[name]
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    expected_out, expected_lse = by_element(q, k, v, **options)
    assert (out.dtype, lse.dtype) == (np.float64, np.float64)
    np.testing.assert_allclose(out, expected_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)
    np.testing.assert_array_equal(reference.attention(q, k, v, **options), out)


def test_words_for_the_offset():
    _, q, k, v = inputs(10)
    for word, offset in (("top_left", 0), ("bottom_right", 1)):
        expected = reference.attention(q, k, v, causal=True, query_offset=offset, window=(2, None))
        np.testing.assert_array_equal(reference.attention(q, k, v, causal=word, window=(2, None)), expected)
    _, q, k, v = inputs(11, (2,), (2,), (2,))
    lengths = {"q_lengths": [2, 5], "kv_lengths": [6, 3]}
    word = reference.attention(q, k, v, causal="bottom_right", **lengths)
    np.testing.assert_array_equal(
        word, reference.attention(q, k, v, causal=True, query_offset=[4, -2], **lengths)
    )


DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "alibi_slopes")


@by_name
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out_lse"])
def test_gradients_against_central_differences(name, with_dlse):
    q, k, v, options = CASES[name]
    arguments = {"q": q, "k": k, "v": v} | {x: options[x] for x in DIFFERENTIABLE[3:] if x in options}
    arguments = {x: np.array(value, np.float64) for x, value in arguments.items()}
    rest = {x: value for x, value in options.items() if x not in arguments}
    rng = np.random.default_rng(99)
    shape = reference.attention(q, k, v, **options).shape
    dout = rng.normal(size=shape)
    dlse = rng.normal(size=shape[:-1]) if with_dlse else None

    def loss():
        named = dict(arguments)
        out, lse = reference.attention(
            named.pop("q"), named.pop("k"), named.pop("v"), return_lse=True, **named, **rest
        )
        return (dout * out).sum() + (0.0 if dlse is None else (dlse * np.where(np.isinf(lse), 0, lse)).sum())

    named = dict(arguments)
    grads = reference.attention_backward(
        dout, named.pop("q"), named.pop("k"), named.pop("v"), dlse=dlse, **named, **rest
    )
    for argument in DIFFERENTIABLE:
        grad = getattr(grads, argument)
        if argument not in arguments:
            assert grad is None
            continue
        x = arguments[argument]
        assert grad.shape == x.shape
        assert grad.dtype == np.float64
        numeric = np.zeros_like(x)
        for at in np.ndindex(*x.shape):
            kept = x[at]
            if np.isinf(kept):
                continue
            x[at] = kept + 1e-5
            above = loss()
            x[at] = kept - 1e-5
            numeric[at] = (above - loss()) / 2e-5
            x[at] = kept
        scale = max(np.linalg.norm(numeric), 1e-3)
        error = np.linalg.norm(grad - numeric) / scale
        assert error < 1e-6, f"{argument} of {name}: relative error {error:.2e}"


def poisoned(rng, lead=(2,)):
    """A call with lengths, window, mask and bias, and the same with NaN wherever it may not read."""
    _, q, k, v = inputs(20, lead, lead, lead, heads_q=2, heads_kv=2, m=5, n=6)
    q_lengths, kv_lengths = np.array([3, 5]), np.array([6, 2])
    mask, bias = rng.random((2, 2, 5, 6)) < 0.7, rng.normal(size=(2, 2, 5, 6))
    options = {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "window": (4, 1), "query_offset": 0}
    i, j = np.arange(5)[:, None], np.arange(6)
    rows, keys = i < q_lengths[:, None, None], j < kv_lengths[:, None, None]
    seen = mask & (rows & keys & (i - 4 <= j) & (j <= i + 1))[:, None]
    bad_q, bad_k, bad_v, bad_bias = q.copy(), k.copy(), v.copy(), np.where(seen, bias, np.nan)
    bad_q[0, :, 3:] = np.nan
    bad_k[1, :, 2:] = np.nan
    bad_v[1, :, 2:] = np.inf
    bad_mask = mask ^ ~(rows & keys)[:, None]
    dout, dlse = rng.normal(size=(2, 2, 5, 2)), rng.normal(size=(2, 2, 5))
    bad_dout, bad_dlse = dout.copy(), dlse.copy()
    bad_dout[0, :, 3:] = np.nan
    bad_dlse[0, :, 3:] = np.inf
    good = (q, k, v, dout, dlse, {**options, "mask": mask, "bias": bias})
    return good, (bad_q, bad_k, bad_v, bad_dout, bad_dlse, {**options, "mask": bad_mask, "bias": bad_bias})


@pytest.mark.parametrize("compute", [reference, testing], ids=["reference", "plain"])
@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 2.0}, {"sinks": np.array([0.3, -0.5])}], ids=["", "softcap", "sinks"]
)
def test_what_may_not_be_read_is_not(compute, extra):
    if compute is reference:
        forward, backward = reference.attention, reference.attention_backward
    else:
        forward, backward = testing.plain, testing.plain_backward
    results = []
    for q, k, v, dout, dlse, options in poisoned(np.random.default_rng(21)):
        out, lse = forward(q, k, v, return_lse=True, **options, **extra)
        grads = backward(dout, q, k, v, dlse=dlse, **options, **extra)
        results.append([out, lse, *(grad for grad in grads if grad is not None)])
    assert not np.isnan(results[0][0]).any()
    for good, bad in zip(*results):
        np.testing.assert_array_equal(bad, good)
    assert not results[1][0][0, :, 3:].any()
    assert np.isneginf(results[1][1][0, :, 3:]).all()
    assert not results[1][2][0, :, 3:].any(), "dq past q_lengths"
    assert not results[1][3][1, :, 2:].any(), "dk past kv_lengths"


def test_nan_reaches_only_the_rows_that_see_it():
    _, q, k, v = inputs(22, heads_q=1)
    bad_q, bad_k = q.copy(), k.copy()
    bad_q[0, 1] = np.nan
    bad_k[0, 4] = np.nan
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, causal=True, query_offset=0)
    out, lse = reference.attention(bad_q, bad_k, v, return_lse=True, causal=True, query_offset=0)
    for row in range(5):
        if row in (1, 4):
            assert np.isnan(out[0, row]).all()
            assert np.isnan(lse[0, row])
        else:
            np.testing.assert_array_equal(out[0, row], expected[0, row])
            assert lse[0, row] == expected_lse[0, row]


@pytest.mark.parametrize("compute", [reference.attention, testing.plain], ids=["reference", "plain"])
def test_an_infinite_score_gives_nan_in_its_row_alone(compute):
    _, q, k, v = inputs(23, heads_q=1)
    bias = np.zeros((5, 6))
    bias[2, 3] = INF
    expected = compute(q, k, v)
    out, lse = compute(q, k, v, bias=bias, return_lse=True)
    assert np.isnan(out[0, 2]).all()
    assert lse[0, 2] == INF
    np.testing.assert_array_equal(np.delete(out, 2, 1), np.delete(expected, 2, 1))
    assert np.isfinite(np.delete(lse, 2, 1)).all()


@pytest.mark.parametrize("compute", [reference, testing], ids=["reference", "plain"])
def test_rows_without_keys(compute):
    forward = reference.attention if compute is reference else testing.plain
    backward = reference.attention_backward if compute is reference else testing.plain_backward
    rng, q, k, v = inputs(24)
    v[0, 0] = np.nan  # no row sees a key, so its weight 0 may not make NaN of the rows' 0
    mask = np.zeros((5, 6), bool)
    sinks, dlse = np.array([0.25, -INF]), rng.normal(size=(2, 5))
    out, lse = forward(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse, [[0.25] * 5, [-INF] * 5])
    assert np.isneginf(forward(q, k, v, mask=mask, return_lse=True)[1]).all()
    assert np.isneginf(forward(q, k, v, bias=np.array(-INF), return_lse=True)[1]).all()
    v[0, 0] = 0
    grads = backward(rng.normal(size=(2, 5, 2)), q, k, v, dlse=dlse, mask=mask, sinks=sinks)
    for grad in grads[:3]:
        assert not grad.any()
    np.testing.assert_allclose(grads.sinks, [dlse[0].sum(), 0.0], rtol=1e-14)


def test_scores_that_overflow_to_minus_infinity_count_as_no_key():
    q, k, v = (
        np.full((1, 2), 1e30, np.float32),
        np.full((3, 2), -1e30, np.float32),
        np.ones((3, 1), np.float32),
    )
    out, lse = testing.plain(q, k, v, return_lse=True)
    assert (out.item(), lse.item()) == (0.0, -INF)
    grads = testing.plain_backward(np.ones((1, 1), np.float32), q, k, v)
    assert all(not grad.any() for grad in grads[:3])
    # a bias is converted to the score dtype, and -inf there means not allowed
    assert np.isneginf(reference.attention(q, q, q, bias=np.array(-1e300), return_lse=True)[1]).all()


def test_shares_of_a_larger_key_set_add_up():
    rng, q, k, v = inputs(30, heads_q=4, heads_kv=2, n=9)
    dout, dlse = rng.normal(size=(4, 5, 2)), rng.normal(size=(4, 5))
    out, lse = reference.attention(q, k, v, return_lse=True)
    whole = reference.attention_backward(dout, q, k, v, dlse=dlse)
    spans = [slice(0, 1), slice(1, 7), slice(7, 7), slice(7, 9)]
    parts = [reference.attention_backward(dout, q, k[:, s], v[:, s], out, lse, dlse=dlse) for s in spans]
    np.testing.assert_allclose(sum(part.q for part in parts), whole.q, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([part.k for part in parts], 1), whole.k, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([part.v for part in parts], 1), whole.v, rtol=1e-12, atol=1e-14)
    delta = (dout * out).sum(-1)
    by_delta = reference.attention_backward(dout, q, k, v, None, lse, dlse=dlse, delta=delta)
    np.testing.assert_allclose(by_delta.q, whole.q, rtol=1e-12, atol=1e-14)


def test_an_empty_row_of_a_part_still_gives_its_sink_the_whole_rows_share():
    rng, q, k, v = inputs(31, heads_q=1)
    sinks, dout = np.array([0.4]), rng.normal(size=(1, 5, 2))
    out, lse = reference.attention(q, k, v, sinks=sinks, return_lse=True)
    whole = reference.attention_backward(dout, q, k, v, sinks=sinks)
    hidden = reference.attention_backward(dout, q, k, v, out, lse, sinks=sinks, mask=np.zeros((5, 6), bool))
    np.testing.assert_allclose(hidden.sinks, whole.sinks, rtol=1e-12)
    assert not hidden.q.any()


def test_shapes_without_a_heads_axis():
    _, q, k, v = inputs(32, heads_q=1)
    out, lse = reference.attention(q[0], k[0], v[0], return_lse=True)
    full, full_lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out, full[0])
    np.testing.assert_array_equal(lse, full_lse[0])
    grads = reference.attention_backward(out, q[0], k[0], v[0], out, lse, dlse=lse)
    for grad, expected in zip(
        grads[:3], reference.attention_backward(full, q, k, v, full, full_lse, dlse=full_lse)
    ):
        np.testing.assert_array_equal(grad, expected[0])
    mixed = reference.attention_backward(full, q, k[0], v)
    assert [mixed.q.shape, mixed.k.shape, mixed.v.shape] == [(1, 5, 3), (6, 3), (1, 6, 2)]


def test_wrt_and_bad_cotangents():
    rng, q, k, v = inputs(33)
    dout = rng.normal(size=(2, 5, 2))
    every = reference.attention_backward(dout, q, k, v, sinks=np.zeros(2), bias=np.zeros((5, 6)))
    for name in ("q", "k", "v", "bias", "sinks"):
        grads = reference.attention_backward(
            dout, q, k, v, sinks=np.zeros(2), bias=np.zeros((5, 6)), wrt=[name]
        )
        assert [x for x in Gradients._fields if getattr(grads, x) is not None] == [name]
        np.testing.assert_array_equal(getattr(grads, name), getattr(every, name))
    assert reference.attention_backward(dout, q, k, v, wrt=()) == Gradients()
    with pytest.raises(ValueError, match="no bias= was given"):
        reference.attention_backward(dout, q, k, v, wrt=["bias"])
    with pytest.raises(ValueError, match=r"dout must have shape \(2, 5, 2\)"):
        reference.attention_backward(dout[:1], q, k, v)
    with pytest.raises(ValueError, match=r"dlse must have shape \(2, 5\)"):
        reference.attention_backward(dout, q, k, v, dlse=np.zeros(5))


def test_float64_inputs_are_answered_to_the_last_place():
    _, q, k, v = inputs(34, heads_q=1, m=4, n=40, d=16, e=3)
    q *= 3
    out, lse = reference.attention(q, k, v, scale=0.5, return_lse=True)
    wider = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps
    tolerance = Decimal("1.2e-16" if wider else "1e-14")
    with localcontext() as context:
        context.prec = 50
        for i in range(4):
            row = [sum(Decimal(x) * Decimal(y) for x, y in zip(q[0, i], key)) / 2 for key in k[0]]
            total = sum(s.exp() for s in row)
            assert abs(Decimal(lse[0, i]) - total.ln()) <= tolerance * abs(total.ln())
            for e in range(3):
                exact = sum(s.exp() / total * Decimal(x) for s, x in zip(row, v[0, :, e]))
                assert abs(Decimal(out[0, i, e]) - exact) <= tolerance * abs(exact) + Decimal("1e-19")


@pytest.mark.gpu
@by_name
def test_device_arrays_give_the_same_numbers(cupy, name):
    q, k, v, options = CASES[name]
    for dtype in (np.float32, np.float64):
        host = [x.astype(dtype) for x in (q, k, v)]
        moved = {
            x: cupy.asarray(value) if x in ("mask", *DIFFERENTIABLE) else value
            for x, value in options.items()
        }
        device = [cupy.asarray(x) for x in host]
        for forward, backward in (
            (reference.attention, reference.attention_backward),
            (testing.plain, testing.plain_backward),
        ):
            out, lse = forward(*device, return_lse=True, **moved)
            expected, expected_lse = forward(*host, return_lse=True, **options)
            assert isinstance(out, cupy.ndarray)
            close = (
                {"rtol": 1e-4, "atol": 1e-5} if out.dtype == np.float32 else {"rtol": 1e-11, "atol": 1e-12}
            )
            np.testing.assert_allclose(out.get(), expected, **close)
            np.testing.assert_allclose(lse.get(), expected_lse, **close)
            dout = np.random.default_rng(1).normal(size=out.shape).astype(dtype)
            grads = backward(cupy.asarray(dout), *device, **moved)
            for grad, value in zip(grads, backward(dout, *host, **options)):
                assert (grad is None) == (value is None)
                if grad is not None:
                    np.testing.assert_allclose(grad.get(), value, **close)
