"""Arrays of other libraries: DLPack and the CUDA array interface, read without a copy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support import BFLOAT16, assert_same, host, qkv

import cupyflash

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch(cupy):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch that sees the GPU")
    return torch


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
def test_K09_torch_tensors_by_dlpack(cupy, torch, dtype):
    arrays = qkv(cupy, batch=2, heads=2, m=37, d=16, dtype=dtype)
    tensors = [torch.from_dlpack(x) for x in arrays]
    for given in (tensors, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]):
        out, vjp = cupyflash.attention_vjp(*given, causal=True)
        expected, expected_vjp = cupyflash.attention_vjp(*arrays, causal=True)
        assert isinstance(out, cupy.ndarray)
        assert_same(host(out), host(expected))
        assert_same(host(vjp(torch.from_dlpack(out))), host(expected_vjp(expected)))
    assert torch.from_dlpack(out).dtype == tensors[0].dtype


def test_torch_tensors_may_stand_beside_cupy_arrays(cupy, torch):
    """Again and again, with new values in them."""
    arrays = qkv(cupy, batch=2, heads=2, m=37, d=16)
    lengths = torch.tensor([5, 37], device="cuda")
    for _ in range(3):
        lengths += torch.tensor([7, -7], device="cuda")
        expected = cupyflash.attention(*arrays, kv_lengths=cupy.asarray(lengths.cpu().numpy()))
        assert_same(host(cupyflash.attention(*arrays, kv_lengths=lengths)), host(expected))


def test_a_seed_may_be_a_torch_tensor(cupy, torch):
    arrays, seed = qkv(cupy, m=37, d=16), torch.tensor(3, device="cuda")
    for _ in range(2):
        seed += 1
        expected = cupyflash.attention(*arrays, dropout_p=0.5, dropout_seed=int(seed))
        assert_same(host(cupyflash.attention(*arrays, dropout_p=0.5, dropout_seed=seed)), host(expected))


def test_torch_tensors_are_read_in_place(cupy, torch):
    q, k, v = (torch.from_dlpack(x) for x in qkv(cupy, m=9))
    _, vjp = cupyflash.attention_vjp(q, k, v)
    v.zero_()
    torch.cuda.synchronize()
    dout = cupy.ones((1, 1, 9, 8), np.float32)
    zeros = cupyflash.attention_vjp(*map(cupy.from_dlpack, (q, k, v)))[1](dout)
    assert_same(host(vjp(dout).v), host(zeros.v))


def test_the_readme_shares_the_stream_of_pytorch(cupy, torch):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    [example] = re.findall(r"<!-- torch -->\n```python\n(.*?)```", text, re.DOTALL)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            names = {}
            exec(example, names)
            q, k, v, out = (names[name] for name in ("q", "k", "v", "out"))
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-2)


def test_work_of_the_producer_comes_first(cupy, torch):
    """DLPack orders the producer's pending work before our reading."""
    slow = torch.ones(4096, 4096, device="cuda")
    arrays = qkv(cupy, heads=2, m=64, d=32)
    expected = cupyflash.attention(3 * arrays[0], *arrays[1:])
    q, k, v = (torch.from_dlpack(x) for x in arrays)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            slow = slow @ slow * 1e-4
        q.mul_(3)
        out = cupyflash.attention(q, k, v)
    assert_same(host(out), host(expected))


def test_a_tensor_that_requires_grad_is_refused_with_advice(cupy, torch):
    q, k, v = (torch.from_dlpack(x) for x in qkv(cupy))
    with pytest.raises(TypeError, match=r"detach\(\)"):
        cupyflash.attention(q.requires_grad_(), k, v)


def test_the_cuda_array_interface(cupy):
    class Foreign:
        def __init__(self, array):
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    arrays = qkv(cupy, m=21)
    assert_same(
        host(cupyflash.attention(*map(Foreign, arrays))),
        host(cupyflash.attention(*arrays)),
    )
