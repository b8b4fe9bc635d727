"""What the tests share: arrays of the module under test, and the comparison with reference and plain.

Every test makes its arrays in ``xp`` (numpy, or cupy where there is a GPU) and comes back to NumPy to compare.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import cupyflash
from cupyflash import Gradients, reference, testing
from cupyflash.arrays import array_module

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
DTYPE_IDS = [dtype.name for dtype in DTYPES]
NEG_INF = float("-inf")


def host(x):
    """NumPy arrays for the arrays of either library in a nest of tuples."""
    if isinstance(x, Gradients):
        return Gradients(*map(host, x))
    if isinstance(x, (tuple, list)):
        return tuple(map(host, x))
    return x.get() if hasattr(x, "get") else x


def wide(x):
    """NumPy, in float64."""
    return np.asarray(host(x)).astype(np.float64)


def normal(xp, shape, dtype=np.float32, seed=0, size=1.0):
    """Normally distributed values; the same ones for the same seed, in every module and dtype up to rounding."""
    values = size * np.random.default_rng(seed).standard_normal(shape)
    return xp.asarray(values.astype(dtype))


def qkv(xp, batch=1, heads=1, m=5, n=None, d=8, e=None, *, heads_kv=None, dtype=np.float32, seed=0, size=1.0):
    """q (batch, heads, m, d), k (batch, heads_kv, n, d), v (batch, heads_kv, n, e)."""
    n, e, heads_kv = m if n is None else n, d if e is None else e, heads_kv or heads
    shapes = (batch, heads, m, d), (batch, heads_kv, n, d), (batch, heads_kv, n, e)
    return tuple(normal(xp, shape, dtype, 3 * seed + part, size) for part, shape in enumerate(shapes))


def eye_values(xp, n, dtype=np.float32, batch=1, heads=1):
    """One-hot v: out is then the matrix of weights."""
    return xp.asarray(np.broadcast_to(np.eye(n), (batch, heads, n, n)).astype(dtype))


def same_bits(a, b):
    """Whether two arrays hold the same bits: NaN equals NaN, and 0 is not -0."""
    a, b = (np.ascontiguousarray(host(x)) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_same(a, b, what="value"):
    """The same bits, in arrays or nests of them."""
    if isinstance(a, tuple):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{what}[{index}]")
        return
    assert (a is None) == (b is None), what
    if a is not None:
        assert same_bits(a, b), f"{what} differs: {host(a)!r} against {host(b)!r}"


def cotangents(xp, out, lse, seed=90):
    """dout and dlse for results of a forward."""
    return normal(xp, out.shape, out.dtype, seed), normal(xp, lse.shape, lse.dtype, seed + 1)


def check(q, k, v, *, backward=True, wrt=None, dout=None, dlse=None, via=cupyflash.attention_vjp, **options):
    """Hold the public API's results to the contract's bound; return (out, lse, gradients) on the host.

    ``via`` is another way to the same results.
    """
    xp = array_module(q)
    (out, lse), vjp = via(q, k, v, return_lse=True, wrt=wrt, **options)
    if backward:
        given = cotangents(xp, out, lse)
        cotangent = tuple(given[i] if x is None else x for i, x in enumerate((dout, dlse)))
        gradients = vjp(*cotangent)
    else:
        cotangent, gradients = None, Gradients()
    actual = {"out": out, "lse": lse, **gradients._asdict()}

    def pair(step=0):
        """(plain, reference) of every result; with a step, of a neighbour of the problem."""
        near_q, near_v, *rest = (x * x.dtype.type(1 + step / 64) for x in (q, v, *(cotangent or ())))
        modules = (testing.plain, testing.plain_backward), (reference.attention, reference.attention_backward)
        return tuple(_results(*module, near_q, k, near_v, rest, wrt, options) for module in modules)

    plain, exact = pair()
    config = f"q {q.shape} k {k.shape} v {v.shape} {q.dtype} {_described(options)}"
    for name, x in actual.items():
        assert (x is None) == (exact[name] is None), f"{name} is given or not"
        if x is not None:
            _assert_within(x, plain[name], exact[name], name, f"{name} of {config}", pair, lse)
    return host(out), host(lse), host(gradients) if backward else None


def _described(options):
    """Options with their arrays by shape and dtype."""
    return {name: f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else x for name, x in options.items()}


def _results(forward, backward, q, k, v, cotangent, wrt, options):
    out, lse = forward(q, k, v, return_lse=True, **options)
    gradients = Gradients()
    if cotangent:
        dout, dlse = cotangent
        gradients = backward(dout, q, k, v, dlse=dlse, wrt=wrt, **options)
    return {"out": out, "lse": lse, **gradients._asdict()}


def _assert_within(actual, plain, exact, name, config, pair, lse):
    """The bound of contract section 7, with plain's error taken over neighbours of the problem where it is lucky.

    With few rows a single rounding, such as that of one lse, decides plain's error; and where a row sees one key,
    plain's forward and backward round its score alike. So there the last place of lse counts, which p carries.
    """
    # A float64 bias beside float32 inputs is summed in float32: that is its rounding unit.
    unit = max(actual.dtype, lse.dtype, key=lambda dtype: ml_dtypes.finfo(dtype).eps)
    try:
        if name == "lse":
            testing.assert_lse_close(actual, plain, exact, config)
        else:
            testing.assert_close(actual, plain, exact, config, dtype=unit)
    except AssertionError:
        found = testing.errors(actual, exact)
        bad_luck = found.max < 20 * testing.error_bound(plain, exact, unit).max
        if not (bad_luck and np.array_equal(np.isfinite(wide(actual)), np.isfinite(wide(exact)))):
            raise
        neighbours = [pair(step) for step in range(1, 33)]
        bounds = [testing.error_bound(near[name], value[name], unit) for near, value in neighbours]
        largest_lse, largest = (abs(x[np.isfinite(x)]).max(initial=1) for x in (wide(lse), wide(exact)))
        carried = largest * float(np.spacing(lse.dtype.type(largest_lse)))
        if any(error > max(bound) + carried for error, bound in zip(found, zip(*bounds))):
            raise
