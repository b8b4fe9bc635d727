"""Bad input: the exception, and a text that names the argument, what was expected, what came and what to do."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import OPERANDS, OUTPUTS, M, N, assert_refused, call, ones, operands
from support import host

import cupyflash
from cupyflash.arrays import overlaps_itself

OPTIONS = {
    "scale text": (lambda xp: {"scale": "0.5"}, TypeError, "scale must be a real number ... '0.5' (str)"),
    "scale bool": (lambda xp: {"scale": True}, TypeError, "scale must be a real number ... bool"),
    "scale complex": (lambda xp: {"scale": 1j}, TypeError, "scale must be a real number ... complex"),
    "scale array": (lambda xp: {"scale": np.ones(2)}, TypeError, "scale must be a real number ... (2,)"),
    "scale NaN": (lambda xp: {"scale": np.nan}, ValueError, "scale must be finite ... nan"),
    "scale inf": (lambda xp: {"scale": float("inf")}, ValueError, "scale must be finite ... inf"),
    "softcap 0": (lambda xp: {"softcap": 0}, ValueError, "softcap must be > 0 ... None for no cap ... 0.0"),
    "softcap negative": (lambda xp: {"softcap": -2.5}, ValueError, "softcap must be > 0 ... -2.5"),
    "softcap NaN": (lambda xp: {"softcap": np.nan}, ValueError, "softcap must be finite"),
    "causal word": (
        lambda xp: {"causal": "left"},
        ValueError,
        "causal must be True, False, 'top_left' or 'bottom_right' ... 'left'",
    ),
    "causal number": (lambda xp: {"causal": 1}, ValueError, "causal must be True, False ... 1"),
    "causal array": (
        lambda xp: {"causal": xp.ones(2, bool)},
        ValueError,
        "causal must be True, False ... (2,)",
    ),
    "causal without alignment": (
        lambda xp: {"causal": True},
        ValueError,
        "causal=True ... m = 5 ... n = 7 ... 'top_left' ... 'bottom_right' ... query_offset=",
    ),
    "window without alignment": (
        lambda xp: {"window": (3, None)},
        ValueError,
        "window ... 'top_left' ... 'bottom_right'",
    ),
    "alibi without alignment": (
        lambda xp: {"alibi_slopes": ones(xp, 4)},
        ValueError,
        "alibi_slopes ... 'top_left' ... 'bottom_right'",
    ),
    "two alignments": (
        lambda xp: {"causal": "top_left", "query_offset": 0},
        ValueError,
        "causal='top_left' ... query_offset ... causal=True",
    ),
    "offset float": (lambda xp: {"query_offset": 1.5}, TypeError, "query_offset must be an integer ... 1.5"),
    "offset bool": (
        lambda xp: {"query_offset": True},
        TypeError,
        "query_offset must be an integer ... bool",
    ),
    "offset shape": (
        lambda xp: {"query_offset": xp.zeros(2, np.int64)},
        ValueError,
        "query_offset must broadcast to the leading axes (without heads) = (1,) ... (2,)",
    ),
    "window one": (
        lambda xp: {"window": 3},
        ValueError,
        "window must be a pair (left, right) ... 3 ... window=(w, 0)",
    ),
    "window three": (lambda xp: {"window": (1, 2, 3)}, ValueError, "window must be a pair ... (1, 2, 3)"),
    "window float": (lambda xp: {"window": (1.0, 0)}, TypeError, "window[0] must be an integer ... 1.0"),
    "window negative": (lambda xp: {"window": (0, -1)}, ValueError, "window[1] must be at least 0 ... -1"),
    "bias ragged": (lambda xp: {"bias": [[1.0, 2.0], [3.0]]}, ValueError, "bias is no array"),
    "mask dtype": (
        lambda xp: {"mask": xp.ones((M, N), np.int32)},
        TypeError,
        "mask must be bool with True = attend ... int32 ... mask != 0 ... bias=",
    ),
    "mask shape": (
        lambda xp: {"mask": xp.ones((N, M), bool)},
        ValueError,
        "mask must broadcast to (..., heads_q, m, n) = (1, 4, 5, 7) ... (7, 5)",
    ),
    "mask enlarges": (
        lambda xp: {"mask": xp.ones((3, 4, M, N), bool)},
        ValueError,
        "mask must broadcast ... (3, 4, 5, 7)",
    ),
    "mask axes": (
        lambda xp: {"mask": xp.ones((1, 1, 1, M, N), bool)},
        ValueError,
        "mask must broadcast ... (1, 1, 1, 5, 7)",
    ),
    "bias bool": (
        lambda xp: {"bias": xp.ones((M, N), bool)},
        TypeError,
        "bias must have one of the dtypes ... bool ... mask=",
    ),
    "bias int": (
        lambda xp: {"bias": xp.ones((M, N), np.int64)},
        TypeError,
        "bias must have one of the dtypes ... int64",
    ),
    "bias shape": (
        lambda xp: {"bias": ones(xp, M, 3)},
        ValueError,
        "bias must broadcast ... (1, 4, 5, 7) ... (5, 3)",
    ),
    "bias text": (
        lambda xp: {"bias": "alibi"},
        TypeError,
        "bias must be a float array or a number ... 'alibi'",
    ),
    "sinks shape": (
        lambda xp: {"sinks": ones(xp, 2)},
        ValueError,
        "sinks must broadcast to (..., heads_q) = (1, 4) ... (2,)",
    ),
    "sinks dtype": (
        lambda xp: {"sinks": xp.ones(4, np.int32)},
        TypeError,
        "sinks must have one of the dtypes ... int32",
    ),
    "slopes shape": (
        lambda xp: {"alibi_slopes": ones(xp, 4, 1), "causal": "top_left"},
        ValueError,
        "alibi_slopes must broadcast to (..., heads_q) = (1, 4) ... (4, 1)",
    ),
    "kv_lengths above": (
        lambda xp: {"kv_lengths": N + 1},
        ValueError,
        "kv_lengths must lie in [0, 7] ... 8",
    ),
    "kv_lengths below": (
        lambda xp: {"kv_lengths": [-1]},
        ValueError,
        "kv_lengths must lie in [0, 7] ... -1",
    ),
    "q_lengths above": (
        lambda xp: {"q_lengths": np.array([9])},
        ValueError,
        "q_lengths must lie in [0, 5] ... 9",
    ),
    "q_lengths float": (lambda xp: {"q_lengths": 3.0}, TypeError, "q_lengths must be an integer ... 3.0"),
    "kv_lengths float array": (
        lambda xp: {"kv_lengths": np.ones(1)},
        TypeError,
        "kv_lengths must have an integer dtype ... float64",
    ),
    "kv_lengths shape": (
        lambda xp: {"kv_lengths": [3, 4]},
        ValueError,
        "kv_lengths must broadcast to the leading axes (without heads) = (1,) ... (2,)",
    ),
    "dropout without a seed": (
        lambda xp: {"dropout_p": 0.5},
        ValueError,
        "dropout_seed is required when dropout_p > 0 ... int",
    ),
    "dropout_p above 1": (
        lambda xp: {"dropout_p": 1.5, "dropout_seed": 0},
        ValueError,
        "dropout_p must lie in [0, 1] ... 1.5",
    ),
    "dropout_p bool": (
        lambda xp: {"dropout_p": True, "dropout_seed": 0},
        TypeError,
        "dropout_p must be a real number ... bool",
    ),
    "seed negative": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": -1},
        ValueError,
        "dropout_seed must be in [0, 18446744073709551615] ... -1",
    ),
    "seed too large": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": 2**64},
        ValueError,
        "dropout_seed must be in ... 18446744073709551616",
    ),
    "seed float": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": 1.0},
        TypeError,
        "dropout_seed must be an integer ... 1.0",
    ),
    "offset too large": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": 1, "dropout_offset": 2**32},
        ValueError,
        "dropout_offset must be in [0, 4294967295] ... 4294967296",
    ),
    "origin pair": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": 1, "dropout_origin": (0, 0)},
        ValueError,
        "dropout_origin must be (t0, i0, j0) ... (0, 0)",
    ),
    "origin column": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": 1, "dropout_origin": (0, 0, 2**31)},
        ValueError,
        "dropout_origin[2] must be in [0, 2147483647] ... 2147483648",
    ),
    "matrix numbers past 32 bits": (
        lambda xp: {"dropout_p": 0.5, "dropout_seed": 1, "dropout_origin": (2**32 - 3, 0, 0)},
        ValueError,
        "dropout_origin[0] ... 2^32 - 1 ... 4294967296",
    ),
    "precision word": (
        lambda xp: {"precision": "fp32"},
        ValueError,
        "precision must be one of ieee, tf32x3, tf32 ... 'fp32'",
    ),
    "deterministic": (
        lambda xp: {"deterministic": 1},
        TypeError,
        "deterministic must be True or False ... 1 (int)",
    ),
    "return_lse": (
        lambda xp: {"return_lse": "yes"},
        TypeError,
        "return_lse must be True or False ... 'yes'",
    ),
    "backend": (
        lambda xp: {"backend": "gpu"},
        ValueError,
        "backend must be 'cpu', 'cuda' or None ... 'gpu'",
    ),
}


@pytest.mark.parametrize("name", [*OPERANDS, *OPTIONS, *OUTPUTS])
def test_attention_refuses(xp, name):
    make, error, text = (OPERANDS | OPTIONS | OUTPUTS)[name]
    assert_refused(lambda: call(xp, **make(xp)), error, text)


@pytest.mark.parametrize("name", [*OPERANDS, *(name for name in OPTIONS if name != "return_lse")])
def test_the_other_functions_refuse_alike(xp, name):
    make, error, text = (OPERANDS | OPTIONS)[name]
    options = make(xp)
    q, k, v = operands(xp, **{x: options.pop(x) for x in "qkv" if x in options}).values()
    out, lse = ones(xp, 1, 4, M, 6), ones(xp, 1, 4, M)
    assert_refused(lambda: cupyflash.attention_vjp(q, k, v, **options), error, text)
    assert_refused(lambda: cupyflash.plan(q, k, v, **options), error, text)
    assert_refused(lambda: cupyflash.attention_backward(out, q, k, v, out, lse, **options), error, text)


def test_nothing_is_written_before_a_refusal(xp):
    q, k, v = operands(xp).values()
    out = xp.full((1, 4, M, 6), 7, np.float32)
    with pytest.raises(ValueError, match="softcap"):
        cupyflash.attention(q, k, v, out=out, softcap=-1)
    assert np.all(host(out) == 7)


def test_precision_is_for_float32(xp):
    q, k, v = (x.astype(np.float16) for x in operands(xp).values())
    assert_refused(
        lambda: cupyflash.attention(q, k, v, precision="tf32"),
        ValueError,
        "precision ... float32 ... float16",
    )


@pytest.mark.parametrize("function", ["attention", "attention_vjp", "plan"])
def test_unknown_options_are_refused(xp, function):
    run = getattr(cupyflash, function)
    assert_refused(lambda: run(*operands(xp).values(), dropout=0.1), TypeError, f"{function}() ... 'dropout'")


def test_whether_an_array_overlaps_itself_is_known_exactly():
    """Against the addresses of all elements, for any strides."""
    rng, memory = np.random.default_rng(0), np.zeros(1000, np.int32)
    found = []
    for _ in range(3000):
        axes = rng.integers(1, 5)
        shape, steps = rng.integers(1, 5, axes), rng.integers(-12, 13, axes)
        x = np.lib.stride_tricks.as_strided(memory[500:], tuple(shape), tuple(4 * steps))
        addresses = {int(np.dot(index, steps)) for index in np.ndindex(x.shape)}
        found.append(overlaps_itself(x))
        assert found[-1] == (len(addresses) < x.size), (x.shape, x.strides)
    assert 500 < sum(found) < 2500


@pytest.mark.parametrize("heads", [0, -2, 2.0, True])
def test_alibi_slopes_refuses(heads):
    error = ValueError if isinstance(heads, int) and not isinstance(heads, bool) else TypeError
    assert_refused(lambda: cupyflash.alibi_slopes(heads), error, f"heads must be ... {heads}")


def test_dropout_mask_refuses():
    assert_refused(
        lambda: cupyflash.dropout_mask((4,), 0.5, 1), ValueError, "shape must be (..., heads, m, n) ... (4,)"
    )
    assert_refused(lambda: cupyflash.dropout_mask((4, 4), 2, 1), ValueError, "p must lie in [0, 1] ... 2")
    assert_refused(lambda: cupyflash.dropout_mask((4, 4), 0.5, None), ValueError, "seed is required")


def test_cuda_without_a_gpu_says_what_is_missing():
    if "cuda" in cupyflash.available_backends():
        pytest.skip("needs a machine without a GPU")
    x = np.ones((3, 4), np.float32)
    assert_refused(lambda: cupyflash.attention(x, x, x, backend="cuda"), RuntimeError, "cuda")


@pytest.mark.gpu
def test_host_and_device_arrays_do_not_mix(cupy):
    q, k, v = operands(cupy).values()
    cases = [
        (lambda: cupyflash.attention(q, host(k), v), "k is on the host ... cupy.asarray(k)"),
        (lambda: cupyflash.attention(host(q), k, v), "k is on ... q is on the host ... cupy.asnumpy(k)"),
        (lambda: cupyflash.attention(q, k, v, backend="cpu"), "backend='cpu' ... cupy.asnumpy(q)"),
        (
            lambda: cupyflash.attention(q, k, v, out=np.empty((1, 4, M, 6), np.float32)),
            "out is on the host",
        ),
    ]
    for run, text in cases:
        assert_refused(run, ValueError, text)


@pytest.mark.gpu
def test_an_origin_on_the_device_is_refused(cupy):
    options = {"dropout_p": 0.5, "dropout_seed": 1, "dropout_origin": (cupy.zeros(4, np.int64), 0, 0)}
    assert_refused(lambda: call(cupy, **options), ValueError, "dropout_origin[0] is on ... host array")
