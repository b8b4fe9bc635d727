"""Small inputs that broke other libraries: strides, alignment and size (E)."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_same, check, host, normal, qkv, wide

import cupyflash
from cupyflash import reference


def results(q, k, v, dout=None, **options):
    """out, lse and gradients of one call."""
    result, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    return (*result, *vjp(result[0] if dout is None else dout))


def assert_layout_is_free(q, k, v, dout=None, **options):
    """The same bits as on contiguous copies of every array."""
    assert len({type(x) for x in (q, k, v)}) == 1
    copies = [None if x is None else x.copy(order="C") for x in (q, k, v, dout)]
    plain = {name: x.copy(order="C") if hasattr(x, "copy") else x for name, x in options.items()}
    assert_same(results(q, k, v, dout, **options), results(*copies, **plain))


def test_E01_transposed_and_packed(xp):
    packed = normal(xp, (2, 70, 3, 4, 16))  # batch, length, q k v, heads, head_dim
    q, k, v = (packed[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
    assert_layout_is_free(q, k, v, causal=True)


def test_E02_only_v_is_a_view(xp):
    q, k, _ = qkv(xp, batch=2, heads=3, m=20)
    v = normal(xp, (2, 20, 3, 8), seed=5).transpose(0, 2, 1, 3)
    assert_layout_is_free(q, k, v)
    check(q, k, v)


@pytest.mark.parametrize("stride", [0, 10**6 + 1])
def test_E05_strides_of_axes_of_length_one_mean_nothing(xp, stride):
    x = normal(xp, (1, 1, 6, 8))
    steps = (4 * stride, 4 * stride, *x.strides[2:])
    odd = xp.lib.stride_tricks.as_strided(x, x.shape, steps)
    assert_layout_is_free(odd, odd, odd)
    column = normal(xp, (1, 2)).T
    assert_layout_is_free(column, column, column)


def test_E06_every_array_argument_may_be_a_view(xp):
    q, k, v = (normal(xp, (4, 2, 12, 33), seed=part)[::2, :, :, 1::2] for part in range(3))
    dout = normal(xp, (2, 2, 16, 12), seed=3).transpose(0, 1, 3, 2)
    options = {
        "bias": normal(xp, (24, 12), seed=4)[::2].T,
        "mask": (normal(xp, (12, 12, 2), seed=5) > -1)[..., 1].T,
        "sinks": normal(xp, (4,), seed=6)[::2],
        "alibi_slopes": normal(xp, (2, 4), seed=7)[:, 1::2],
        "kv_lengths": xp.asarray([12, 0, 7, 0])[::2],
        "q_lengths": xp.asarray([9, 12])[::-1],
        "query_offset": xp.asarray([[1], [-2]])[:, 0],
    }
    assert_layout_is_free(q, k, v, dout, **options)
    check(q, k, v, dout=dout, **options)


def test_E07_broadcast_arrays(xp):
    q = normal(xp, (3, 4, 10, 8))
    k = xp.broadcast_to(normal(xp, (10, 8), seed=1), (3, 2, 10, 8))
    v = xp.broadcast_to(normal(xp, (2, 1, 6), seed=2), (3, 2, 10, 6))
    bias = xp.broadcast_to(normal(xp, (10, 1), seed=3), (3, 4, 10, 10))
    assert_layout_is_free(q, k, v, bias=bias)
    check(q, k, v, bias=bias)


def test_E08_negative_strides(xp):
    q, k, v = qkv(xp, batch=2, heads=2, m=40)
    q, k, v = q[:, :, ::-1], k[..., ::-1], v[::-1, ::-1, ::-1, ::-1]
    assert_layout_is_free(q, k, v, causal=True)
    check(q, k, v, causal=True)


def far_apart(xp, rows, step, columns, dtype=np.float16):
    """A view of rows that lie ``step`` elements apart in one buffer, untouched memory between them."""
    try:
        buffer = xp.zeros((rows - 1) * step + columns, dtype)
    except MemoryError:
        pytest.skip(f"needs {rows * step * np.dtype(dtype).itemsize >> 30} GiB of address space")
    size = buffer.itemsize
    return xp.lib.stride_tricks.as_strided(buffer, (rows, columns), (step * size, size))


def test_E09_row_strides_beyond_32_bits(xp):
    buffer = far_apart(xp, 3, 2**30 + 64, 4 * 16)
    buffer[...] = normal(xp, buffer.shape, np.float16)
    q, k, v, dout = (buffer[:, part : part + 16] for part in range(0, 64, 16))
    assert_layout_is_free(q, k, v, dout)


def test_E11_more_than_2_31_elements(xp):
    try:
        k, v = (xp.zeros((5, 1, 2**23, 64), np.float16) for _ in range(2))
    except MemoryError:
        pytest.skip("needs 11 GiB of address space")
    assert k.size > 2**31
    q = normal(xp, (5, 1, 2, 64), np.float16)
    k[:, :, :4], v[:, :, :4] = (normal(xp, (5, 1, 4, 64), np.float16, seed) for seed in (1, 2))
    out = cupyflash.attention(q, k, v, kv_lengths=4)
    exact = reference.attention(q[-1:], k[-1:, :, :4], v[-1:, :, :4])
    np.testing.assert_allclose(wide(out)[-1:], wide(exact), rtol=0, atol=2e-3)


def test_E13_a_mask_of_more_than_2_31_elements(xp):
    length = 50_000
    mask = xp.zeros((length, length), bool)
    mask[-5:, -8:] = normal(xp, (5, 8)) > -0.5
    q, k, v = qkv(xp, m=length, d=2)
    out = cupyflash.attention(q, k, v, mask=mask, window=(6, 0))
    tail = slice(-8, None)
    exact = reference.attention(
        q[:, :, -5:], k[:, :, tail], v[:, :, tail], mask=mask[-5:, tail], window=(6, 0), query_offset=3
    )
    assert not wide(out)[:, :, :-5].any()
    np.testing.assert_allclose(wide(out)[:, :, -5:], wide(exact), rtol=0, atol=1e-6)


def test_E15_sizes_in_64_bits(xp):
    x = xp.broadcast_to(xp.zeros(1, np.float16), (64, 128, 65536, 128))
    plan = cupyflash.plan(x, x, x, backward=False)
    rows = 64 * 128 * 65536
    assert plan.flops == 4 * rows * 65536 * 128
    assert plan.output_bytes == rows * 128 * 2 + rows * 4
    assert 0 <= plan.workspace_bytes < plan.output_bytes


def test_E16_out_beyond_8_gib(xp):
    out = far_apart(xp, 2, 2**31 + 64, 8, np.float32)
    q, k, v = (x[0, 0] for x in qkv(xp, m=2))
    assert cupyflash.attention(q, k, v, out=out) is out
    assert_same(out, cupyflash.attention(q, k, v))


@pytest.mark.parametrize("batch", [65536, 70000])
def test_E17_batches_beyond_the_grid(xp, batch):
    check(*qkv(xp, batch=batch, m=2), backward=False)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
def test_E20_odd_storage_offsets(xp, offset):
    buffers = [normal(xp, (offset + 2 * 20 * 16,), np.float16, part) for part in range(4)]
    q, k, v, dout = (x[offset:].reshape(1, 2, 20, 16) for x in buffers)
    assert_layout_is_free(q, k, v, dout)


def test_E20_elements_off_their_alignment(xp):
    if xp is not np:
        pytest.skip("CuPy has no arrays off their dtype's alignment")
    raw = np.zeros((3, 4 * 6 * 8 + 1), np.uint8)
    parts = []
    for part, row in enumerate(raw):
        x = row[1:].view(np.float32).reshape(6, 8)
        assert not x.flags.aligned
        x[...] = normal(np, (6, 8), seed=part)
        parts.append(x)
    assert_layout_is_free(*parts)


@pytest.mark.gpu
def test_E21_arrays_on_two_devices(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        k = cupy.ones((3, 4), np.float32).T
    with cupy.cuda.Device(0):
        q = cupy.ones((4, 3), np.float32)
        with pytest.raises(ValueError, match=r"k is on .*1.* but q is on .*0"):
            cupyflash.attention(q, k, k)


def test_E22_out_as_a_view_writes_its_own_elements_alone(xp):
    q, k, v = qkv(xp, heads=2, m=9)
    big = xp.full((1, 2, 18, 8), 7, np.float32)
    assert cupyflash.attention(q, k, v, out=big[:, :, ::2]).base is big
    assert_same(big[:, :, ::2], cupyflash.attention(q, k, v))
    assert np.all(host(big)[:, :, 1::2] == 7)
