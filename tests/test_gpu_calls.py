"""Calls on the GPU: graphs, streams, threads, devices, and calls that allocate nothing."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from support import assert_same, check, host, normal, qkv, same_bits

import cupyflash
from cupyflash import testing
from cupyflash.cuda import calls, families, module

pytestmark = pytest.mark.gpu


@contextmanager
def counted_allocations(cupy):
    """A list that receives the size of every allocation from CuPy's pool."""
    sizes = []

    class Count(cupy.cuda.MemoryHook):
        name = "count"

        def malloc_preprocess(self, device_id, size, mem_size):
            sizes.append(size)

    with Count():
        yield sizes


def scratch(cupy, *arrays, **options):
    """The workspace that the plan of a call asks for."""
    return cupy.empty(cupyflash.plan(*arrays, **options).workspace_bytes, cupy.uint8)


def record(cupy, call):
    """The graph of one call, after a warm-up on the capturing stream."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    return stream, graph


def test_K06_a_graph_replays_with_new_data(cupy):
    arrays = qkv(cupy, heads=2, m=70, d=32, dtype=np.float16)
    seed, offset = cupy.zeros((), cupy.uint64), cupy.zeros((), cupy.uint64)
    lengths = cupy.asarray([50])
    options = {"causal": True, "dropout_p": 0.3, "kv_lengths": lengths}
    devices = {"dropout_seed": seed, "dropout_offset": offset}
    out, lse = cupy.empty_like(arrays[0]), cupy.empty(arrays[0].shape[:-1], np.float32)
    workspace = scratch(cupy, *arrays, **options, **devices)

    def call():
        cupyflash.attention(
            *arrays, **options, **devices, return_lse=True, out=(out, lse), workspace=workspace
        )

    stream, graph = record(cupy, call)
    for replay in range(3):
        fresh = qkv(cupy, heads=2, m=70, d=32, dtype=np.float16, seed=replay + 5)
        for old, new in zip(
            (*arrays, seed, offset, lengths), (*fresh, 2**63 + replay, replay, 30 + 20 * replay)
        ):
            old[...] = new
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = cupyflash.attention(
            *fresh, **options, dropout_seed=2**63 + replay, dropout_offset=replay, return_lse=True
        )
        assert_same((out, lse), expected, f"replay {replay}")


def test_K06_a_backward_graph_replays_with_new_data(cupy):
    arrays = qkv(cupy, heads=4, heads_kv=2, m=65, d=24)
    sinks, dout = normal(cupy, (4,), seed=50), normal(cupy, (1, 4, 65, 24), seed=51)
    out, lse = cupyflash.attention(*arrays, sinks=sinks, return_lse=True)
    targets = cupyflash.Gradients(*map(cupy.empty_like, arrays), sinks=cupy.empty_like(sinks))
    workspace = scratch(cupy, *arrays, sinks=sinks, backward=True)

    def call():
        cupyflash.attention_backward(
            dout, *arrays, out, lse, sinks=sinks, grads_out=targets, workspace=workspace
        )

    stream, graph = record(cupy, call)
    dout[...] = normal(cupy, dout.shape, seed=60)
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_same(targets, cupyflash.attention_backward(dout, *arrays, out, lse, sinks=sinks), "gradients")


def test_K06_a_capture_without_a_warm_up_says_what_to_do(cupy, monkeypatch):
    monkeypatch.setattr(module, "_loaded", {})
    calls.clear()
    arrays = qkv(cupy, d=8)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="before the capture"):
                cupyflash.attention(*arrays)
        finally:
            stream.end_capture()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_K06_replays_leave_the_memory_of_others_alone(cupy, dtype, layout):
    """Scratch and copies of a captured call stay its own, though the call is over."""
    q, k, v = (testing.lay_out(x, layout) for x in qkv(cupy, heads=2, m=130, d=64, dtype=dtype))
    results = []

    def call():
        out, vjp = cupyflash.attention_vjp(q, k, v)
        results[:] = [out, *vjp(out)[:3]]

    stream, graph = record(cupy, call)
    with stream:
        others = [cupy.zeros(n, cupy.uint8) for n in range(512, 300_000, 512)]
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    assert not any(x.any() for x in others)
    out, vjp = cupyflash.attention_vjp(q, k, v)
    assert_same(host(tuple(results)), host((out, *vjp(out)[:3])))


def test_K06_layouts_that_are_copied_whole_cannot_be_captured(cupy):
    q, k, v = (cupy.zeros((2, 3, 2, 3, 2, 2, 4, 8)).transpose(4, 3, 2, 1, 0, 5, 6, 7) for _ in "qkv")
    cupyflash.attention(q, k[:1], v)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="CUDA graph"):
                cupyflash.attention(q, k[:1], v)
        finally:
            stream.end_capture()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_call_with_out_and_workspace_allocates_nothing(cupy, layout):
    arrays = qkv(cupy, heads=2, m=40, d=16)
    if layout == "transposed":
        arrays = tuple(cupy.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in arrays)
    options = {"causal": True, "alibi_slopes": cupy.asarray([0.5, 0.25], np.float32)}
    out, lse = cupyflash.attention(*arrays, **options, return_lse=True)
    targets = cupyflash.Gradients(*map(cupy.empty_like, arrays), alibi_slopes=cupy.empty(2, np.float32))
    forward = scratch(cupy, *arrays, **options)
    backward = scratch(cupy, *arrays, **options, backward=True)
    dout = cupy.ones_like(out)
    for warm in (True, False):
        with counted_allocations(cupy) as sizes:
            cupyflash.attention(*arrays, **options, return_lse=True, out=(out, lse), workspace=forward)
            cupyflash.attention_backward(
                dout, *arrays, out, lse, **options, grads_out=targets, workspace=backward
            )
        assert warm or sizes == []


def test_a_workspace_that_does_not_fit_is_refused(cupy):
    q, k, v = qkv(cupy, m=40)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    need = cupyflash.plan(q, k, v, backward=True).workspace_bytes
    for wrong, error in (
        (cupy.empty(need - 1, cupy.uint8), ValueError),
        (cupy.empty(2 * need, cupy.uint8)[::2], ValueError),
        (cupy.empty(need, cupy.int8), TypeError),
        (np.empty(need, np.uint8), TypeError),
    ):
        with pytest.raises(error, match="workspace"):
            cupyflash.attention_backward(out, q, k, v, out, lse, workspace=wrong)


def test_the_current_stream_is_used(cupy):
    """On any other stream the call would read q before the slow work ahead of it has ended."""
    q, k, v = qkv(cupy, heads=2, m=64, d=32)
    expected = cupyflash.attention(2 * q, k, v)
    slow = cupy.ones((4096, 4096), np.float32)
    slow @ slow
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            slow @ slow
        q *= 2
        out, vjp = cupyflash.attention_vjp(q, k, v)
        gradients = vjp(out)
        stream.synchronize()
    assert same_bits(out, expected)
    assert_same(gradients, cupyflash.attention_vjp(q, k, v)[1](expected))


def test_K04_four_threads_at_first_call_compile_once(cupy, monkeypatch):
    compiled, compile_one = [], module._compile

    def counting(config, device):
        compiled.append(config)
        return compile_one(config, device)

    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(module, "_compile", counting)
    calls.clear()
    arrays = [qkv(cupy, heads=2, m=50, d=16, seed=seed) for seed in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    results, barrier = [None] * 4, threading.Barrier(4)

    def work(index):
        barrier.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out, vjp = cupyflash.attention_vjp(*arrays[index], causal=True)
            results[index] = host((out, vjp(out)))
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == len(set(compiled)) > 0
    for given, result in zip(arrays, results):
        out, vjp = cupyflash.attention_vjp(*given, causal=True)
        assert_same(result, host((out, vjp(out))))


def test_K03_arrays_choose_the_device(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        arrays = qkv(cupy, m=20)
    with cupy.cuda.Device(0):
        out = cupyflash.attention(*arrays)
        assert out.device.id == 1
        assert same_bits(out, cupyflash.attention(*qkv(cupy, m=20)))
        with pytest.raises(ValueError, match="device"):
            cupyflash.attention(cupy.asarray(host(arrays[0])), *arrays[1:])
        here = (
            {"kv_lengths": cupy.asarray([3])},
            {"dropout_p": 0.5, "dropout_seed": cupy.asarray(3, np.uint64)},
        )
        for options in here:
            with pytest.raises(ValueError, match="device"):
                cupyflash.attention(*arrays, **options)


VARIANTS = {
    "other data": lambda xp, q, k, v: ((q + 1, k, v), {}),
    "other strides": lambda xp, q, k, v: ((q[..., ::-1], k, v[:, :, ::-1]), {}),
    "another dtype": lambda xp, q, k, v: (tuple(x.astype(np.float64) for x in (q, k, v)), {}),
    "another scale": lambda xp, q, k, v: ((q, k, v), {"scale": 0.5}),
    "causal": lambda xp, q, k, v: ((q, k, v), {"causal": True}),
    "a window": lambda xp, q, k, v: ((q, k, v), {"window": (3, 0)}),
    "a mask": lambda xp, q, k, v: ((q, k, v), {"mask": xp.tri(33, k=3, dtype=bool)}),
    "a broadcast mask": lambda xp, q, k, v: ((q, k, v), {"mask": xp.arange(33) < 20}),
    "device lengths": lambda xp, q, k, v: ((q, k, v), {"kv_lengths": xp.asarray([7, 21])}),
    "narrow device lengths": lambda xp, q, k, v: ((q, k, v), {"kv_lengths": xp.asarray([7, 21], np.int32)}),
    "host lengths": lambda xp, q, k, v: ((q, k, v), {"kv_lengths": [5, 33]}),
    "other host lengths": lambda xp, q, k, v: ((q, k, v), {"kv_lengths": [6, 33]}),
    "one length": lambda xp, q, k, v: ((q, k, v), {"kv_lengths": 9}),
    "dropout": lambda xp, q, k, v: ((q, k, v), {"dropout_p": 0.5, "dropout_seed": 1}),
    "another seed": lambda xp, q, k, v: ((q, k, v), {"dropout_p": 0.5, "dropout_seed": 2**63}),
    "a device seed": lambda xp, q, k, v: (
        (q, k, v),
        {"dropout_p": 0.5, "dropout_seed": xp.asarray(3, np.uint64)},
    ),
    "an offset": lambda xp, q, k, v: ((q, k, v), {"dropout_p": 0.5, "dropout_seed": 1, "dropout_offset": 7}),
    "sinks": lambda xp, q, k, v: ((q, k, v), {"sinks": xp.asarray([1.0, -1.0])}),
    "a 0-d scale": lambda xp, q, k, v: ((q, k, v), {"scale": np.asarray(0.25)}),
    "two axes": lambda xp, q, k, v: ((q[0, 0], k[0, 0], v[0, 0]), {}),
}


def test_repeated_calls_of_many_forms_keep_their_own_meaning(cupy):
    """The memo in front of Problem may serve a call only with what that very call asked for."""
    q, k, v = qkv(cupy, batch=2, heads=2, m=33, d=16)
    given = {name: make(cupy, q, k, v) for name, make in VARIANTS.items()}
    calls.clear()
    first = {name: host(cupyflash.attention(*arrays, **options)) for name, (arrays, options) in given.items()}
    for _ in range(2):
        for name, (arrays, options) in reversed(given.items()):
            assert_same(host(cupyflash.attention(*arrays, **options)), first[name], name)
    # The numbers of narrow device lengths are those of the wide ones; all else differs.
    assert len({x.tobytes() for x in first.values()}) == len(first) - 1


def test_repeated_backwards_of_many_forms_keep_their_own_meaning(cupy):
    """The same of gradients, with the forward of a vjp and without, and of which are wanted."""
    q, k, v = qkv(cupy, batch=2, heads=2, m=33, d=16)
    given = {name: make(cupy, q, k, v) for name, make in VARIANTS.items()}
    wanted = (None, "v", ["k", "q"])

    def results(arrays, options):
        for wrt in wanted:
            out, vjp = cupyflash.attention_vjp(*arrays, wrt=wrt, **options)
            yield out, vjp(arrays[0])
        _, lse = cupyflash.attention(*arrays, return_lse=True, **options)
        yield cupyflash.attention_backward(arrays[0], *arrays, out, lse, dlse=lse, **options)

    calls.clear()
    first = {name: host(tuple(results(*call))) for name, call in given.items()}
    for _ in range(2):
        for name, call in reversed(given.items()):
            assert_same(host(tuple(results(*call))), first[name], name)


def test_a_remembered_backward_still_refuses_bad_values(cupy):
    arrays = qkv(cupy, m=6)
    out, lse = cupyflash.attention(*arrays, return_lse=True)
    for _ in range(2):
        cupyflash.attention_backward(out, *arrays, out, lse, wrt=("q", "k"))
    for error, wrong in (
        (TypeError, {"accumulate": 0}),
        (ValueError, {"accumulate": True}),
        (ValueError, {"wrt": ("q", "k", "bias")}),
        (ValueError, {"dlse": lse[..., :-1]}),
        (ValueError, {"dlse": host(lse)}),
    ):
        with pytest.raises(error):
            cupyflash.attention_backward(out, *arrays, out, lse, **{"wrt": ("q", "k")} | wrong)
    with pytest.raises(TypeError, match="dout must have dtype"):
        cupyflash.attention_backward(out.astype(np.float64), *arrays, out, lse, wrt=("q", "k"))


def test_a_remembered_call_still_refuses_bad_values(cupy):
    arrays = qkv(cupy, m=6)
    for _ in range(2):
        cupyflash.attention(*arrays, causal=True, dropout_p=1.0, dropout_seed=1)
    for error, wrong in (
        (ValueError, {"causal": 1, "dropout_p": 1.0, "dropout_seed": 1}),
        (TypeError, {"causal": True, "dropout_p": True, "dropout_seed": 1}),
        (ValueError, {"causal": True, "dropout_p": 1.0, "dropout_seed": -1}),
        (ValueError, {"causal": True, "dropout_p": 1.0, "dropout_seed": 2**64}),
        (TypeError, {"causal": True, "dropout_p": 1.0, "dropout_seed": True}),
        (TypeError, {"causal": True, "dropout_p": 1.0, "dropout_seed": 1, "deterministic": 1}),
    ):
        with pytest.raises(error):
            cupyflash.attention(*arrays, **wrong)
    with pytest.raises(ValueError, match="head_dim"):
        cupyflash.attention(arrays[0], arrays[1][..., :-1], arrays[2], causal=True)


def test_a_remembered_call_still_refuses_addresses_between_elements(cupy):
    q, k, v = qkv(cupy, m=16)
    raw = cupy.zeros(16 * 16 * 4 + 4, cupy.uint8)
    even, odd = (raw[start:][:1024].view(np.float32).reshape(16, 16) for start in (0, 2))
    for _ in range(2):
        cupyflash.attention(q, k, v, bias=even)
    with pytest.raises(ValueError, match="bias lies at an address"):
        cupyflash.attention(q, k, v, bias=odd)


@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.float32], ids=["mask", "bias", "float32 bias"])
@pytest.mark.parametrize("d", [64, 256])
def test_a_remembered_call_takes_masks_and_biases_that_lie_less_evenly(cupy, d, dtype):
    """Hopper's kernels read them 16 bytes at a time, or in pairs; elsewhere they are copied."""
    q, k, v = qkv(cupy, m=64, d=d, dtype=np.float16)
    raw = cupy.zeros(64 * 64 * np.dtype(dtype).itemsize + 16, cupy.uint8)

    def results(start):
        x = raw[start : raw.size - 16 + start].view(dtype).reshape(64, 64)
        x[...] = normal(cupy, (64, 64)) > 0
        out, vjp = cupyflash.attention_vjp(q, k, v, **{"mask" if dtype is np.bool_ else "bias": x})
        return host((out, *vjp(q)[:3]))

    first = results(0)
    for start in (0, np.dtype(dtype).itemsize, 8, 0):
        assert_same(results(start), first, f"{start} bytes off")


def test_host_arrays_go_there_and_back(cupy):
    arrays = qkv(np, heads=2, m=30, d=16)
    out, vjp = cupyflash.attention_vjp(*arrays, backend="cuda", kv_lengths=20)
    assert type(out) is np.ndarray
    on_device = cupyflash.attention_vjp(*map(cupy.asarray, arrays), kv_lengths=20)
    assert_same(out, on_device[0])
    assert_same(vjp(out), host(on_device[1](cupy.asarray(out))))


def test_a_check_reports_on_kernels_that_were_compiled_before(cupy):
    """Where there is a driver, NVRTC keeps what it has compiled, and gives that back without a log."""
    x = np.broadcast_to(np.float32(0), (1, 1, 8, 64))
    first, second = (cupyflash.compile_kernels(x, x, x, arch=80, family="simt")[0] for _ in range(2))
    assert first.registers == second.registers >= 16


def test_many_heads_that_share_few_keys(cupy, monkeypatch):
    """As many as the L2 cache has keys for are 2^32: a number of heads at once that an order of blocks divides by."""
    monkeypatch.setattr(families, "FORCED", "sm80")
    check(*qkv(cupy, 1, 65536, 4, 4, 8, heads_kv=1, dtype=np.float16), backward=False, causal=True)
