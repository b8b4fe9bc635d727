"""Memory on the GPU: linear in length, within the bars, and what `plan` says."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support import BFLOAT16, qkv

import cupyflash
from cupyflash import reference, testing

pytestmark = pytest.mark.gpu
MIB = 2**20


def peak_bytes(cupy, call):
    """(result, bytes that were taken from CuPy's pool at once, the result's included)."""
    live = peak = 0

    class Watch(cupy.cuda.MemoryHook):
        name = "watch"

        def malloc_postprocess(self, device_id, size, mem_size, mem_ptr, pmem_id):
            nonlocal live, peak
            live += mem_size
            peak = max(peak, live)

        def free_postprocess(self, device_id, mem_size, mem_ptr, pmem_id):
            nonlocal live
            live -= mem_size

    with Watch():
        result = call()
    return result, peak


def total(arrays):
    return sum(x.nbytes for x in arrays if x is not None)


def planned(arrays, **options):
    p = cupyflash.plan(*arrays, **options)
    return p.output_bytes + p.workspace_bytes + p.copied_bytes


def warmed(cupy, call):
    """Kernels compiled and lengths uploaded before the count."""
    call()
    return peak_bytes(cupy, call)


def long_head(cupy, length, dtype=np.float16):
    return qkv(cupy, m=length, d=128, dtype=dtype)


def test_one_head_of_100_000_forward(cupy):
    arrays = long_head(cupy, 100_000)
    out, peak = warmed(cupy, lambda: cupyflash.attention(*arrays))
    assert peak - out.nbytes <= 4 * 100_000 + 16 * MIB
    assert peak == pytest.approx(planned(arrays), rel=0.1)
    rows = [0, 1, 4097, 99_999]
    few = (arrays[0][:, :, rows], *arrays[1:])
    testing.assert_close(out[:, :, rows], testing.plain(*few), reference.attention(*few), "rows of 100,000")


def test_one_head_of_100_000_backward(cupy):
    arrays = long_head(cupy, 100_000)
    out, lse = cupyflash.attention(*arrays, return_lse=True)
    dout = cupy.zeros_like(out)
    rows = [3, 50_000, 99_998]
    dout[:, :, rows] = qkv(cupy, m=3, d=128, dtype=np.float16, seed=9)[0]
    gradients, peak = warmed(cupy, lambda: cupyflash.attention_backward(dout, *arrays, out, lse))
    elements = sum(x.size for x in gradients[:3])
    assert peak - total(gradients) <= 4 * elements + 16 * 100_000 + 16 * MIB
    assert peak == pytest.approx(planned(arrays, backward=True), rel=0.1)
    # Rows whose dout is 0 add nothing to any gradient: those of the few rows alone are the whole.
    few = dout[:, :, rows], arrays[0][:, :, rows], *arrays[1:]
    near, exact = testing.plain_backward(*few), reference.attention_backward(*few)
    for name in ("k", "v"):
        values = [getattr(x, name) for x in (gradients, near, exact)]
        testing.assert_close(*values, f"gradient of {name}")
    testing.assert_close(gradients.q[:, :, rows], near.q, exact.q, "gradient of q")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "dropout_p": 0.1, "dropout_seed": 1}], ids=["plain", "options"]
)
def test_memory_grows_linearly(cupy, backward, options):
    peaks = []
    for length in (25_000, 50_000, 100_000, 200_000):
        q, k, v = long_head(cupy, length, BFLOAT16)
        out, lse = cupy.zeros_like(q), cupy.zeros((1, 1, length), np.float32)
        # Lengths of 1 keep the work small; memory does not depend on them.
        few = options | {"q_lengths": 1, "kv_lengths": 1}
        call = {
            False: lambda q=q, k=k, v=v, few=few: cupyflash.attention(q, k, v, return_lse=True, **few),
            True: lambda q=q, k=k, v=v, out=out, lse=lse, few=few: cupyflash.attention_backward(
                out, q, k, v, out, lse, **few
            ),
        }[backward]
        peaks.append(warmed(cupy, call)[1])
    for smaller, larger in pairwise(peaks):
        assert larger / smaller == pytest.approx(2, rel=0.05)


LAYOUTS = {
    "transposed": lambda cupy, x: cupy.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "heads inside": lambda cupy, x: testing.lay_out(x, "heads_inside"),
    "stride 0": lambda cupy, x: cupy.broadcast_to(x[:1, :1], x.shape),
    "reversed": lambda cupy, x: x[..., ::-1, :],
    "five leading axes": lambda cupy, x: cupy.broadcast_to(
        x[:, None, None, None, None], (2, 3, 4, 2, 2, *x.shape[1:])
    ).swapaxes(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_layouts_cost_what_the_plan_says(cupy, layout, backward):
    arrays = [LAYOUTS[layout](cupy, x) for x in qkv(cupy, batch=2, heads=4, m=500, d=64)]
    out, lse = cupyflash.attention(*arrays, return_lse=True)
    if backward:
        _, peak = warmed(cupy, lambda: cupyflash.attention_backward(out, *arrays, out, lse))
    else:
        _, peak = warmed(cupy, lambda: cupyflash.attention(*arrays))
    assert peak == pytest.approx(planned(arrays, backward=backward), rel=0.1)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("broadcast", [False, True], ids=["", "broadcast"])
def test_leading_axes_that_do_not_merge_cost_what_the_plan_says(cupy, backward, broadcast):
    """More of them than the fast families take in place."""
    given = qkv(cupy, batch=24, heads=4, m=500, d=64, dtype=np.float16)
    arrays = [x.reshape(3, 2, 4, *x.shape[1:]).transpose(2, 0, 1, 3, 4, 5) for x in given]
    if broadcast:
        arrays[1:] = [x[:, :1] for x in arrays[1:]]
    out, lse = cupyflash.attention(*arrays, return_lse=True)
    call = {
        False: lambda: cupyflash.attention(*arrays, return_lse=True),
        True: lambda: cupyflash.attention_backward(out, *arrays, out, lse),
    }[backward]
    _, peak = warmed(cupy, call)
    assert peak == pytest.approx(planned(arrays, backward=backward), rel=0.1)
