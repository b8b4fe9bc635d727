"""The CPU backend beside what every backend must do: tiles of every kind, bits, order of sums, threads, plan."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support import BFLOAT16, DTYPE_IDS, DTYPES, NEG_INF, assert_same, check, cotangents, normal, qkv

import cupyflash
from cupyflash import Gradients, cpu, reference, testing
from cupyflash.cpu import backward_pass, forward_pass, scores, shares, workers
from cupyflash.problem import Problem

rng = np.random.default_rng(7)
HEADS, M, N = (2, 4), 41, 67
OPTIONS = {
    "none": {},
    "scale": {"scale": -0.3},
    "causal": {"causal": "top_left"},
    "causal at the end": {"causal": "bottom_right"},
    "offsets": {"causal": True, "query_offset": [-9, 30]},
    "window": {"window": (9, 4), "query_offset": 5},
    "window and lengths": {
        "window": (20, None),
        "query_offset": 3,
        "q_lengths": [41, 17],
        "kv_lengths": [5, 60],
    },
    "lengths": {"q_lengths": [0, 33], "kv_lengths": [50, 0]},
    "mask": {"mask": rng.random((4, M, N)) < 0.6},
    "mask with empty rows": {"mask": (rng.random((4, M, N)) < 0.6) & (np.arange(M)[:, None] % 7 > 0)},
    "key mask": {"mask": rng.random((2, 1, 1, N)) < 0.6},
    "bias": {
        "bias": np.where(rng.random((*HEADS, M, N)) < 0.1, NEG_INF, rng.standard_normal((*HEADS, M, N)))
    },
    "bias of heads": {"bias": rng.standard_normal((4, M, N)).astype(np.float32)},
    "bias of all": {"bias": rng.standard_normal((M, N)).astype(np.float16)},
    "bias of all in float32": {"bias": rng.standard_normal((M, N)).astype(np.float32)},
    "bias of a batch item": {"bias": rng.standard_normal((2, 1, M, N)).astype(BFLOAT16)},
    "bias of keys": {"bias": rng.standard_normal((2, 1, 1, N)).astype(np.float32)},
    "bias of queries": {"bias": rng.standard_normal((1, 4, M, 1)).astype(np.float16)},
    "bias of a head": {
        "bias": rng.standard_normal((4, 1, 1)).astype(np.float32),
        "sinks": np.zeros(4, np.float32),
    },
    "alibi": {"alibi_slopes": rng.random((2, 4)).astype(np.float32), "causal": "bottom_right"},
    "alibi of all heads": {"alibi_slopes": np.float16([0.25]), "query_offset": -7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": rng.standard_normal(4).astype(np.float32), "kv_lengths": [67, 0]},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "dropout_origin": (5, 100, 7)},
    "everything": {
        "causal": True,
        "query_offset": [20, 31],
        "window": (40, None),
        "mask": rng.random((1, 4, M, N)) < 0.9,
        "bias": rng.standard_normal((1, 1, 1, N)).astype(np.float32),
        "alibi_slopes": rng.random(4).astype(np.float32),
        "softcap": 2.0,
        "sinks": rng.standard_normal((2, 1)).astype(np.float32),
        "q_lengths": [41, 30],
        "kv_lengths": [60, 67],
        "dropout_p": 0.2,
        "dropout_seed": 2**63,
    },
}


def operands(dtype=np.float32, heads_kv=2):
    return qkv(np, 2, 4, M, N, 6, 5, heads_kv=heads_kv, dtype=dtype)


def use_tiles(monkeypatch, kept, moved, elements=1):
    """Tiles of ``kept`` by ``moved`` float32 scores instead of the usual ones."""
    for side in ("_KEPT_QUERIES", "_KEPT_KEYS"):
        monkeypatch.setattr(f"cupyflash.cpu.tiles.{side}", kept)
    monkeypatch.setattr("cupyflash.cpu.tiles._MOVED_BYTES", 4 * moved)
    monkeypatch.setattr("cupyflash.cpu.tiles._TILE_BYTES", 4 * elements)


def use_threads(monkeypatch, count):
    """That many workers on any problem, whatever BLAS has."""

    class Threads:
        def __enter__(self):
            return count

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(workers, "_blas", Threads())
    monkeypatch.setattr(cpu, "_THREADS_FROM", 0)


@pytest.mark.parametrize("tiles", [(16, 24, 1), (64, 8, 1), (24, 16, 1200)], ids=["wide", "tall", "stacked"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_over_many_tiles(monkeypatch, options, tiles):
    use_tiles(monkeypatch, *tiles)
    check(*operands(), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", ["none", "everything"])
def test_every_dtype_over_many_tiles(monkeypatch, dtype, name):
    use_tiles(monkeypatch, 16, 24)
    check(*operands(dtype), **OPTIONS[name])


@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right", "kv_lengths": 1000}], ids=["full", "causal"]
)
@pytest.mark.parametrize("size", [1.0, 9.0], ids=["small scores", "large scores"])
def test_tiles_of_the_usual_size(options, size):
    check(*qkv(np, 1, 2, 1100, 1040, 16, 24, heads_kv=1, size=size), **options)


def test_a_sum_without_maximum_is_redone_where_it_leaves_the_number_range():
    m, d = 1030, 4
    q = np.zeros((1, m, d), np.float32)
    k = np.zeros((1, m, d), np.float32)
    q[..., 0], k[:, ::2, 0] = 30.0, 1.0
    for power, sign in ((1e30, 1), (1e-37, -1)):
        v = np.full((1, m, 3), power, np.float32)
        exact = reference.attention(q, sign * k, v, scale=1.0)
        np.testing.assert_allclose(cupyflash.attention(q, sign * k, v, scale=1.0), exact, rtol=1e-5)


def test_scores_that_grow_from_tile_to_tile(monkeypatch):
    use_tiles(monkeypatch, 16, 24)
    q, k, v = operands()
    k *= np.geomspace(1e-3, 1e4, N, dtype=np.float32)[:, None]
    check(q, k, v)
    check(q, k[:, :, ::-1], v)


@pytest.mark.parametrize("tile", [(16, 24), (4096, 4096)], ids=["many tiles", "one tile"])
def test_equal_large_scores_cancel(monkeypatch, tile):
    use_tiles(monkeypatch, *tile)
    q, k, v = qkv(np, 1, 1, 90, 70, 8)
    q[...], k[...] = 1000 * q[..., :1, :], 1000 * k[..., :1, :]  # all scores are one number near 1e6
    check(q, k, v)


def test_a_row_with_an_infinite_score_leaves_the_gradients_of_keys_hidden_from_it_alone(monkeypatch):
    use_tiles(monkeypatch, 16, 24)
    q, k, v = operands()
    bias = np.zeros((M, N), np.float32)
    bias[3, 2] = np.inf
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, causal="top_left", bias=bias, return_lse=True)
    assert np.isposinf(lse[..., 3]).all()
    assert np.isnan(out).any(axis=(0, 1, 3)).tolist() == [row == 3 for row in range(M)]
    dk, dv = vjp(np.ones_like(out))[1:3]
    for grad in (dk, dv):
        assert np.isfinite(grad[..., 4:, :]).all()


def test_a_row_without_keys_reads_no_value(monkeypatch):
    use_tiles(monkeypatch, 16, 24)
    q, k, v = operands()
    v[..., 0, :] = k[..., 0, :] = np.nan
    mask = np.ones((M, N), bool)
    mask[5] = mask[:, 0] = False
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, mask=mask, return_lse=True)
    assert_same(out[..., 5, :], np.zeros_like(out[..., 5, :]))
    assert_same(lse[..., 5], np.full_like(lse[..., 5], NEG_INF))
    dq = vjp(np.ones_like(out)).q
    assert_same(dq[..., 5, :], np.zeros_like(dq[..., 5, :]))


LEADS = [
    ((3, 2), (3, 1), (1, 2)),
    ((1,), (4,), (4,)),
    ((2,), (1,), (1,)),
    ((2, 1), (1, 1), (2, 3)),
    ((), (2,), ()),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("leads", LEADS, ids=str)
@pytest.mark.parametrize("bias", [None, (1, 21, 33), (2, 1, 33), (21, 33)], ids=str)
def test_gradients_of_broadcast_arguments(monkeypatch, leads, bias, dtype):
    use_tiles(monkeypatch, 8, 12)
    shapes = (2, 21, 5), (1, 33, 5), (1, 33, 4)
    q, k, v = (
        normal(np, (*lead, *shape), dtype, seed) for seed, (lead, shape) in enumerate(zip(leads, shapes))
    )
    options = {} if bias is None else {"bias": normal(np, bias, dtype, 9)}
    check(q, k, v, causal="bottom_right", **options)


@pytest.mark.parametrize("leads", [((2,), (1,), (2,)), ((1,), (2,), (2,))], ids=str)
def test_16_bit_gradients_are_rounded_once(monkeypatch, leads):
    use_tiles(monkeypatch, 8, 12)
    shapes = (2, 21, 5), (1, 33, 5), (1, 33, 4)
    q, k, v = (
        normal(np, (*lead, *shape), np.float16, seed) for seed, (lead, shape) in enumerate(zip(leads, shapes))
    )
    options = {"bias": normal(np, (21, 33), np.float16, 9), "sinks": np.float16([0.5, -0.5])}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout = normal(np, out.shape, np.float16, 5)
    narrow = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    targets = Gradients(*(None if x is None else np.empty(x.shape, np.float32) for x in narrow))
    wide = cupyflash.attention_backward(dout, q, k, v, out, lse, grads_out=targets, **options)
    for x, y in zip(narrow, wide):
        if x is not None:
            assert_same(x, y.astype(np.float16))


BITS = [qkv(np, 3, 4, 33, 50, 8, heads_kv=2), qkv(np, 2, 2, 1030, 600, 8, heads_kv=1)]


@pytest.mark.parametrize("arrays", BITS, ids=["stacked", "one by one"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right", "dropout_p": 0.4, "dropout_seed": 1}], ids=str
)
def test_bits_do_not_depend_on_the_batch_and_heads_beside(arrays, options):
    q, k, v = (x.copy() for x in arrays)
    k[-1] *= 30  # scores too large for the shortcut of the others
    batch, heads, group = len(q), q.shape[1], q.shape[1] // k.shape[1]
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout, dlse = cotangents(np, out, lse)
    whole = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for b in range(batch):
        for head in range(0, heads, group):
            item, kv_head = slice(b, b + 1), head // group
            own, kv = (item, slice(head, head + group)), (item, slice(kv_head, kv_head + 1))
            alone = dict(options, dropout_origin=(b * heads + head, 0, 0))
            part = cupyflash.attention(q[own], k[kv], v[kv], return_lse=True, **alone)
            assert_same(part, (out[own], lse[own]))
            grads = cupyflash.attention_backward(
                dout[own], q[own], k[kv], v[kv], *part, dlse=dlse[own], **alone
            )
            assert_same(tuple(grads[:3]), (whole.q[own], whole.k[kv], whole.v[kv]))


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_bits_do_not_depend_on_strides(layout):
    for arrays in BITS:
        expected = cupyflash.attention_vjp(*arrays, causal="bottom_right")
        found = cupyflash.attention_vjp(*(testing.lay_out(x, layout) for x in arrays), causal="bottom_right")
        assert_same(found[0], expected[0])
        dout = normal(np, expected[0].shape)
        assert_same(tuple(found[1](testing.lay_out(dout, layout))[:3]), tuple(expected[1](dout)[:3]))


@pytest.mark.parametrize("name", ["none", "bias of all", "bias of keys", "alibi", "everything"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("kept", [8, 40], ids=["many tasks a unit", "few tasks a unit"])
def test_bits_do_not_depend_on_the_number_of_workers(monkeypatch, name, dtype, kept):
    use_tiles(monkeypatch, kept, 12)
    arrays, options = operands(dtype), OPTIONS[name]

    def run(threads):
        use_threads(monkeypatch, threads)
        results, vjp = cupyflash.attention_vjp(*arrays, return_lse=True, **options)
        return (*results, *vjp(*cotangents(np, *results)))

    expected = run(1)
    compute = backward_pass.BackwardWorker._member

    def first_task_last(self, task, *rest):
        if task.number == 0:
            time.sleep(0.05)
        compute(self, task, *rest)

    monkeypatch.setattr(backward_pass.BackwardWorker, "_member", first_task_last)
    for threads in (2, 5):
        assert_same(run(threads), expected)


def test_every_worker_stops_when_one_fails(monkeypatch):
    use_tiles(monkeypatch, 8, 12)
    use_threads(monkeypatch, 3)
    q, k, v = operands()
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    count, add_q = iter(range(10**6)), shares.TaskShares.add_q

    def fail_later(*args):
        if next(count) == 20:
            raise MemoryError("the twentieth tile")
        add_q(*args)

    monkeypatch.setattr(shares.TaskShares, "add_q", fail_later)
    before = threading.active_count()
    with pytest.raises(MemoryError, match="the twentieth tile"):
        cupyflash.attention_backward(out, q, k, v, out, lse)
    assert threading.active_count() == before


@pytest.mark.parametrize("caller", ["main", "another"])
def test_a_call_leaves_blas_its_threads(caller):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    arrays = qkv(np, 1, 2, 1100, d=8)
    during = []

    def threads():
        return [x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"), pytest.MonkeyPatch.context() as patch:
        before, finish = threads(), forward_pass.ForwardWorker._finish
        patch.setattr(
            forward_pass.ForwardWorker, "_finish", lambda *args: during.append(threads()) or finish(*args)
        )
        if caller == "main":
            cupyflash.attention(*arrays)
        else:
            calls = [threading.Thread(target=cupyflash.attention, args=arrays) for _ in range(3)]
            for call in calls:
                call.start()
            for call in calls:
                call.join()
        assert threads() == before
    assert set(map(tuple, during)) == {(1,) * len(before)}


def test_the_workers_are_as_many_as_the_threads_of_blas():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    arrays = qkv(np, 1, 2, 1100, d=8)
    found = []
    for count in (1, 2):
        with threadpoolctl.threadpool_limits(count, user_api="blas"):
            found.append(cupyflash.plan(*arrays).workspace_bytes)
    assert found[1] == 2 * found[0]


def test_every_thread_limits_a_blas_that_keeps_a_limit_for_each(monkeypatch):
    limited = set()

    class Controller:
        """What threadpoolctl has for BLAS on OpenMP, where a limit is the calling thread's."""

        def __init__(self, *libraries):
            self.lib_controllers = libraries

        def limit(self, limits):
            limited.update((threading.get_ident(), limits) for _ in self.lib_controllers)
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        restore_original_limits = __exit__

    class Library:
        num_threads = 3

    monkeypatch.setattr(workers, "_controllers", lambda: (Controller(), Controller(Library())))
    monkeypatch.setattr(cpu, "_THREADS_FROM", 0)
    use_tiles(monkeypatch, 16, 24)
    used = set()
    attend = forward_pass.ForwardWorker._attend

    def record(*args):
        used.add((threading.get_ident(), 1))
        attend(*args)

    monkeypatch.setattr(forward_pass.ForwardWorker, "_attend", record)
    cupyflash.attention(*operands())
    assert used <= limited
    assert len(limited) >= 2


GEOMETRIES = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (30, 10), "query_offset": 12},
    "lengths": {"causal": "bottom_right", "q_lengths": 100, "kv_lengths": 70},
}


@pytest.mark.parametrize("options", GEOMETRIES.values(), ids=GEOMETRIES)
def test_only_tiles_that_someone_sees_are_computed_and_only_borders_are_masked(monkeypatch, options):
    block_q, block_kv = 16, 24
    use_tiles(monkeypatch, block_q, block_kv)
    q, k, v = qkv(np, m=150, n=110, d=4)
    problem = Problem.create(q, k, v, **options)
    lengths = (int(np.ravel(x)[0]) for x in problem.host_lengths())
    seen = problem.visibility(*lengths).allowed(range(150), range(110))
    tiles, masked = [], []
    options_of, outside = scores.Scorer.options, scores._outside

    def record(self, tile, index, rows, cols, *rest):
        tiles.append((rows, cols))
        return options_of(self, tile, index, rows, cols, *rest)

    monkeypatch.setattr(scores.Scorer, "options", record)

    def record_mask(rows, cols, visibility):
        masked.append((rows, cols))
        return outside(rows, cols, visibility)

    monkeypatch.setattr(scores, "_outside", record_mask)
    out, vjp = cupyflash.attention_vjp(q, k, v, **options)
    forward = [*tiles]
    vjp(out)
    for computed in (forward, tiles[len(forward) :]):
        visits = np.zeros(seen.shape, int)
        for rows, cols in computed:
            visits[rows, cols] += 1
            assert seen[rows, cols].any(axis=0).all()
            assert seen[rows, cols].any(axis=1).all()
        assert (visits[seen] == 1).all()
        assert visits.max() == 1
    assert all(not seen[rows, cols].all() for rows, cols in masked)
    assert masked or not options


@pytest.mark.parametrize("shape", [(2, 3, 9), (1, 1, 1100)], ids=["stacked", "one by one"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_a_single_key_has_no_gradient_but_that_of_its_value(shape, dtype):
    batch, heads, m = shape
    q, k, v = qkv(np, batch, heads, m, 40, 7, 11, dtype=dtype)
    out, vjp = cupyflash.attention_vjp(q, k, v, kv_lengths=1)
    dq, dk = vjp(normal(np, out.shape, dtype))[:2]
    assert not dq.any()
    assert not dk.any()


def test_zero_sizes_have_zero_gradients():
    for m, n in ((3, 0), (0, 3), (0, 0)):
        q, k, v = qkv(np, 2, 1, m, n, 4)
        (out, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True)
        for x, grad in zip((q, k, v), vjp(out, np.ones_like(lse))):
            assert_same(grad, np.zeros_like(x))


def test_shares_are_added_in_the_order_of_tasks():
    order, seen = workers.Order(), []

    def second():
        order.wait("first", 1)
        seen.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    seen.append("first")
    order.advance("first", 1)
    thread.join()
    assert seen == ["first", "second"]


@pytest.mark.parametrize("backward", [False, True])
def test_plan_names_what_runs(backward):
    x = np.broadcast_to(np.float32(0), (4, 16, 8192, 64))
    plan = cupyflash.plan(x, x, x, causal=True, backward=backward)
    name, tiles = ("bwd", (256, 512)) if backward else ("fwd", (1024, 256))
    assert plan.config == f"cpu {name} float32 d64 q{tiles[0]} kv{tiles[1]}"
    assert (plan.backend, plan.family, plan.block_q, plan.block_kv) == ("cpu", "numpy", *tiles)
    pairs = 4 * 16 * 8192 * 8193 // 2
    assert plan.flops == pairs * 2 * (5 if backward else 2) * 64
    assert plan.output_bytes == (3 if backward else 1) * x.size * 4 + (0 if backward else x.size // 64 * 4)
    assert plan.copied_bytes == 0
    assert plan.bytes_moved > plan.output_bytes


def test_small_matrices_are_stacked():
    x = np.broadcast_to(np.float32(0), (1000, 1, 16, 8))
    assert cupyflash.plan(x, x, x).config.endswith("q16 kv16 s512")
    calls = []
    worker = forward_pass.ForwardWorker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_attend", lambda self, index, *_: calls.append(index))
        cupyflash.attention(x, x, x)
    assert len(calls) == 2
