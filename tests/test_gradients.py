"""Every gradient of the public API against central differences of the public forward, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from support import host, normal, qkv

import cupyflash

STEP = 2e-5


def operands(xp):
    """A call with every differentiable argument: grouped heads, unequal lengths, e != d."""
    q, k, v = qkv(xp, batch=2, heads=4, heads_kv=2, m=5, n=7, d=3, e=2, dtype=np.float64)
    options = {
        "bias": normal(xp, (2, 1, 1, 7), np.float64, 11),
        "sinks": normal(xp, (4,), np.float64, 12),
        "alibi_slopes": normal(xp, (2, 4), np.float64, 13, size=0.3),
    }
    return {"q": q, "k": k, "v": v} | options


def central_differences(loss, x):
    """The gradient of ``loss`` with respect to the array ``x``, changed in place and restored."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        value = float(x[index])
        x[index] = value + STEP
        above = loss()
        x[index] = value - STEP
        below = loss()
        x[index] = value
        gradient[index] = (above - below) / (2 * STEP)
    return gradient


CONFIGS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (2, 1), "query_offset": 1},
    "softcap": {"softcap": 1.5, "scale": -0.8},
    "lengths": {"q_lengths": (5, 3), "kv_lengths": (4, 7)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 5},
    "all": {
        "causal": "bottom_right",
        "window": (3, None),
        "softcap": 2.0,
        "q_lengths": (4, 5),
        "kv_lengths": (7, 5),
        "dropout_p": 0.3,
        "dropout_seed": 6,
    },
}


@pytest.mark.parametrize(("config", "with_dlse"), [("plain", False), *((config, True) for config in CONFIGS)])
def test_gradients_are_central_differences(xp, config, with_dlse):
    arguments = operands(xp)
    options = CONFIGS[config] | {"causal": CONFIGS[config].get("causal", False)}
    if not options["causal"] and "query_offset" not in options:
        options["query_offset"] = 2
    mask = normal(xp, (5, 7), seed=14) > -1
    rest = {name: x for name, x in arguments.items() if name not in "qkv"} | options | {"mask": mask}
    q, k, v = (arguments[name] for name in "qkv")
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **rest)
    dout = normal(xp, out.shape, np.float64, 15)
    dlse = normal(xp, lse.shape, np.float64, 16) if with_dlse else None

    def loss():
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **rest)
        value = (dout * out).sum()
        return float(value + (dlse * xp.where(lse == -np.inf, 0, lse)).sum() if with_dlse else value)

    gradients = host(vjp(dout, dlse))
    for name, x in arguments.items():
        expected = central_differences(loss, x)
        actual = getattr(gradients, name)
        assert actual.shape == expected.shape
        error = abs(actual - expected).max() / abs(expected).max()
        assert error < 1e-6, f"{config}: gradient of {name} is off by {error:.1e} of its largest value"


@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (4, 1, 1), (2, 1, 5, 7), (1, 4, 5, 7)])
def test_gradients_of_a_broadcast_bias_are_central_differences(xp, shape):
    arguments = operands(xp)
    q, k, v = (arguments[name] for name in "qkv")
    bias = normal(xp, shape, np.float64, 17)
    sinks = arguments["sinks"]  # without sinks a bias alike for all keys changes nothing
    out, vjp = cupyflash.attention_vjp(q, k, v, bias=bias, sinks=sinks, wrt="bias", softcap=2.0)
    dout = normal(xp, out.shape, np.float64, 18)

    def loss():
        return float((dout * cupyflash.attention(q, k, v, bias=bias, sinks=sinks, softcap=2.0)).sum())

    expected = central_differences(loss, bias)
    actual = host(vjp(dout).bias)
    assert actual.shape == shape
    assert abs(actual - expected).max() < 1e-6 * abs(expected).max()


def test_the_gradient_of_a_merge_is_central_differences(xp):
    parts = [(normal(xp, (4, 3), np.float64, 20 + s), normal(xp, (4,), np.float64, 30 + s)) for s in range(3)]
    parts[1][1][2] = -np.inf
    (out, lse), vjp = cupyflash.merge_vjp(parts)
    dout, dlse = normal(xp, out.shape, np.float64, 40), normal(xp, lse.shape, np.float64, 41)

    def loss():
        out, lse = cupyflash.merge(*parts)
        return float((dout * out).sum() + (dlse * lse).sum())

    for part, gradients in zip(parts, host(vjp(dout, dlse))):
        for x, actual in zip(part, gradients):
            expected = central_differences(loss, x)
            assert abs(actual - expected).max() < 1e-6 * abs(expected).max()
