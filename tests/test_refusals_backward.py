"""Bad input of the functions beside `attention`: the exception and the text (see test_refusals.py)."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import M, N, assert_refused, ones, operands

import cupyflash
from cupyflash import Gradients


def backward(xp, **changes):
    """`attention_backward` with some of its arguments replaced."""
    positional = {
        "dout": ones(xp, 1, 4, M, 6),
        **operands(xp),
        "out": ones(xp, 1, 4, M, 6),
        "lse": ones(xp, 1, 4, M),
    }
    positional |= {name: changes.pop(name) for name in tuple(positional) if name in changes}
    return cupyflash.attention_backward(*positional.values(), **changes)


BACKWARD = {
    "dout shape": (
        lambda xp: {"dout": ones(xp, 1, 4, M, 8)},
        ValueError,
        "dout must have shape (1, 4, 5, 6) ... (1, 4, 5, 8)",
    ),
    "dout dtype": (
        lambda xp: {"dout": ones(xp, 1, 4, M, 6, dtype=np.float16)},
        TypeError,
        "dout must have dtype float32 ... float16",
    ),
    "out missing": (lambda xp: {"out": None}, ValueError, "out is None ... delta"),
    "lse missing": (lambda xp: {"lse": None}, ValueError, "lse is None ... return_lse=True"),
    "lse shape": (
        lambda xp: {"lse": ones(xp, 1, 2, M)},
        ValueError,
        "lse must have shape (1, 4, 5) ... (1, 2, 5)",
    ),
    "lse dtype": (
        lambda xp: {"lse": ones(xp, 1, 4, M, dtype=np.float64)},
        TypeError,
        "lse must have dtype float32 ... float64",
    ),
    "dlse shape": (
        lambda xp: {"dlse": ones(xp, 4, M)},
        ValueError,
        "dlse must have shape (1, 4, 5) ... (4, 5)",
    ),
    "delta dtype": (
        lambda xp: {"delta": ones(xp, 1, 4, M, dtype=np.float16)},
        TypeError,
        "delta must have dtype float32 ... float16",
    ),
    "wrt unknown": (
        lambda xp: {"wrt": ("q", "mask")},
        ValueError,
        "wrt names 'mask' ... q, k, v, bias, sinks, alibi_slopes",
    ),
    "wrt no names": (lambda xp: {"wrt": 3}, TypeError, "wrt must be names ... got 3 (int)"),
    "wrt not given": (lambda xp: {"wrt": "bias"}, ValueError, "wrt names 'bias' ... no bias= was given"),
    "grads_out a tuple": (
        lambda xp: {"grads_out": (ones(xp, 1, 4, M, 8),)},
        TypeError,
        "grads_out must be a cupyflash.Gradients ... tuple",
    ),
    "grads_out shape": (
        lambda xp: {"grads_out": Gradients(k=ones(xp, 1, 4, N, 8))},
        ValueError,
        "grads_out.k must have shape (1, 2, 7, 8) ... (1, 4, 7, 8)",
    ),
    "grads_out dtype": (
        lambda xp: {"grads_out": Gradients(q=ones(xp, 1, 4, M, 8, dtype=np.float64))},
        TypeError,
        "grads_out.q must have dtype float32 ... float64",
    ),
    "grads_out not given": (
        lambda xp: {"grads_out": Gradients(sinks=ones(xp, 4))},
        ValueError,
        "grads_out.sinks is given, but no sinks= was given",
    ),
    "accumulate without arrays": (
        lambda xp: {"accumulate": True},
        ValueError,
        "accumulate=True adds to grads_out ... q, k, v",
    ),
    "accumulate": (
        lambda xp: {"accumulate": "yes"},
        TypeError,
        "accumulate must be True or False ... 'yes'",
    ),
    "unknown option": (
        lambda xp: {"return_lse": True},
        TypeError,
        "attention_backward() got an unexpected keyword argument 'return_lse'",
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_attention_backward_refuses(xp, name):
    make, error, text = BACKWARD[name]
    assert_refused(lambda: backward(xp, **make(xp)), error, text)


def test_results_that_share_memory_are_refused(xp):
    x = xp.zeros((3, 1, 4, M, 8), np.float32)
    q, k, v = x[0], x[1], x[2]
    assert_refused(
        lambda: cupyflash.attention(q, k, v, out=x[1]), ValueError, "out shares memory with an input"
    )
    bias = ones(xp, 1, 4, M, M)
    view = bias[..., :1].reshape(-1)[: 4 * M]
    assert view.size == 4 * M
    lse = bias.reshape(-1)[: 4 * M].reshape(1, 4, M)
    run = {"bias": bias, "return_lse": True, "out": (xp.empty_like(q), lse)}
    assert_refused(lambda: cupyflash.attention(q, k, v, **run), ValueError, "lse shares memory with an input")
    (out, lse), dout = cupyflash.attention(q, k, v, return_lse=True), xp.ones_like(q)

    def run_backward(**targets):
        return cupyflash.attention_backward(dout, q, k, v, out, lse, grads_out=Gradients(**targets))

    for shared in (q, dout, out):
        assert_refused(
            lambda x=shared: run_backward(q=x), ValueError, "grads_out.q shares memory with an input"
        )
    both = xp.empty_like(q)
    assert_refused(lambda: run_backward(q=both, k=both), ValueError, "grads_out.k shares memory with")


def test_merge_refuses(xp):
    part = ones(xp, 3, 4), ones(xp, 3)
    assert_refused(lambda: cupyflash.merge(), ValueError, "merge")
    assert_refused(
        lambda: cupyflash.merge(part, (ones(xp, 2, 4), ones(xp, 2))), ValueError, "(2, 4) ... (3, 4)"
    )
    assert_refused(lambda: cupyflash.merge(part, (part[0], ones(xp, 3, 1))), ValueError, "lse ... (3, 1)")
    assert_refused(
        lambda: cupyflash.merge(part, (part[0].astype(np.float64), part[1])),
        TypeError,
        "float64 ... float32",
    )
