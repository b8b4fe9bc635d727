"""``cupyflash run`` and ``check``: their reports, their judgement of results, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import load, report, run
from support import BFLOAT16, assert_same, normal, qkv

import cupyflash
from cupyflash import reference, testing
from cupyflash.cli import _case
from cupyflash.cli._judge import _Found, _judged_together
from cupyflash.cli._sample import Part, part_arguments, sampled_columns, sampled_rows
from cupyflash.problem import Problem

# run


def test_run_reports_kernel_time_memory_and_error():
    found = report(
        "run", "--shape", "2,4,40,16", "--heads-kv", 2, "--seqlen-k", 50, "--head-dim-v", 8, "--backward"
    )
    assert found["arrays"]["q"] == "float32 (2, 4, 40, 16)"
    assert found["arrays"]["k"] == "float32 (2, 2, 50, 16)"
    assert found["arrays"]["v"] == "float32 (2, 2, 50, 8)"
    assert found["forward"]["flops"] == 2 * 8 * 40 * 50 * (16 + 8)
    assert found["forward"]["all_score_matrices_bytes"] == 8 * 40 * 50 * 4
    for section in ("forward", "backward"):
        assert found[section]["kernel"].startswith(f"cpu {'fwd' if section == 'forward' else 'bwd'} float32 ")
        assert found[section]["seconds"] > 0
        assert found[section]["extra_memory_bytes"] > 0
    assert [line["result"] for line in found["check"]] == ["out", "lse", "dq", "dk", "dv"]
    for line in found["check"]:
        assert 0 < line["max_error"] <= line["bound"] < 1e-4
    assert found["passed"] is True
    text = run("run", "--shape", "2,40,16")
    assert "kernel" in text
    assert "passed" in text


OPTIONS = {
    "causal": (("--causal",), {"causal": True}),
    "bottom right": (("--causal", "bottom_right"), {"causal": "bottom_right"}),
    "window": (("--window", "5,none"), {"window": (5, None)}),
    "offset": (("--query-offset", "3", "--causal"), {"query_offset": 3, "causal": True}),
    "lengths": (("--kv-lengths", "20,0", "--q-lengths", "24,7"), {"kv_lengths": [20, 0], "q_lengths": [24, 7]}),
    "scale": (("--scale", "0.3", "--softcap", "2"), {"scale": 0.3, "softcap": 2.0}),
    "alibi": (("--alibi", "--causal"), {"alibi_slopes": cupyflash.alibi_slopes(4), "causal": True}),
    "dropout": (
        ("--dropout-p", "0.3", "--dropout-seed", "9", "--dropout-offset", "4", "--dropout-origin", "1,2,3"),
        {"dropout_p": 0.3, "dropout_seed": 9, "dropout_offset": 4, "dropout_origin": (1, 2, 3)},
    ),
    "precision": (("--precision", "ieee", "--no-deterministic"), {"precision": "ieee", "deterministic": False}),
}  # fmt: skip


@pytest.mark.parametrize(("words", "options"), OPTIONS.values(), ids=OPTIONS)
def test_run_computes_what_the_api_does(words, options, files):
    q, k, v = files
    found = report("run", "--npz", "qkv.npz", *words, "--backward", "--dout", "q.npy", "--output", "all.npz")
    assert found["passed"]
    (out, lse), vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    expected = {"out": out, "lse": lse} | {
        f"d{name}": x for name, x in vjp(q)._asdict().items() if x is not None
    }
    saved = load("all.npz")
    assert sorted(saved) == sorted(expected)
    for name, x in expected.items():
        assert_same(saved[name], x, name)


def test_run_takes_arrays_of_options_from_files(files):
    q, k, v = files
    mask = np.random.default_rng(1).random((24, 24)) < 0.6
    slopes, sinks = normal(np, (4,), seed=2), normal(np, (4,), seed=3)
    for name, x in (("mask", mask), ("slopes", slopes), ("sinks", sinks)):
        np.save(f"{name}.npy", x)
    words = ("--mask", "mask.npy", "--bias", "bias.npy", "--sinks", "sinks.npy", "--alibi", "slopes.npy")
    found = report(
        "run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", *words, "--backward", "--output", "o.npz"
    )
    assert found["passed"]
    options = {"mask": mask, "bias": np.load("bias.npy"), "sinks": sinks, "alibi_slopes": slopes}
    saved = load("o.npz")
    assert_same(saved["out"], cupyflash.attention(q, k, v, **options))
    assert set(saved) == {"out", "lse", "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_run_converts_and_checks_every_dtype(dtype, files):
    found = report("run", "--npz", "qkv.npz", "--dtype", dtype, "--causal", "--backward", "--sample", 200)
    assert found["arrays"]["q"].startswith(dtype)
    assert found["passed"]
    assert 500 < found["check"][0]["values"] <= 2 * 4 * 24 * 8


def test_run_reads_back_the_bfloat16_that_numpy_saved(files):
    np.savez("half.npz", **{name: x.astype(BFLOAT16) for name, x in zip("qkv", files)})
    assert report("run", "--npz", "half.npz")["arrays"]["q"] == "bfloat16 (2, 4, 24, 8)"


def test_run_takes_two_dimensional_arrays_and_empty_ones():
    assert report("run", "--shape", "30,8", "--seqlen-k", 20, "--backward")["passed"]
    assert report("run", "--shape", "2,3,0,8", "--backward")["check"] == []
    nothing = report("run", "--shape", "2,3,5,8", "--seqlen-k", 0, "--backward")
    assert nothing["passed"]
    assert nothing["check"][0]["max_error"] == 0


def test_run_fails_where_one_value_is_wrong(monkeypatch):
    def wrong(*arrays, **options):
        out, lse = cupyflash.attention(*arrays, **options)
        out[..., -1, 3] += 1e-4
        return out, lse

    monkeypatch.setattr(_case, "attention", wrong)
    found = report("run", "--shape", "2,2,33,8", code=1)
    assert found["passed"] is False
    assert "out: max error" in found["check"][0]["failure"]
    assert found["check"][1]["passed"]
    run("run", "--shape", "2,2,33,8", "--sample", 0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_run_fails_where_a_gradient_is_wrong(name, monkeypatch):
    def wrong(*arrays, **options):
        gradients = cupyflash.attention_backward(*arrays, **options)
        getattr(gradients, name)[..., 0, 1] *= 1.01
        return gradients

    monkeypatch.setattr(_case, "attention_backward", wrong)
    found = report("run", "--shape", "2,2,33,8", "--backward", code=1)
    assert [line["result"] for line in found["check"] if not line["passed"]] == [f"d{name}"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--shape", "2,3"), "passed"),
        (("--shape", "2,x"), "not a list of integers"),
        (("--shape", "2,3,4,0"), "head_dim d >= 1"),
        (("--shape", "2,3,-4,8"), "below 0"),
        (("--shape", "9,8", "--heads-kv", 2), "needs a --shape with heads"),
        (("--seqlen-k", 9, "--causal"), "causal='bottom_right'"),
        (("--causal", "sideways"), "'sideways' is not one of"),
        (("--window", "3"), "not LEFT,RIGHT"),
        (("--window", "3,-1"), "window[1] must be at least 0"),
        (("--softcap", "0"), "softcap must be > 0"),
        (("--scale", "nan"), "scale must be finite"),
        (("--dropout-p", "0.5"), "dropout_seed is required"),
        (("--dropout-p", "2", "--dropout-seed", 1), "dropout_p must lie in [0, 1]"),
        (("--kv-lengths", "9999"), "kv_lengths must lie in [0, 1024]"),
        (("--precision", "tf32", "--dtype", "float16"), "precision"),
        (("--npz", "qkv.npz", "--q", "q.npy"), "not both"),
        (("--q", "q.npy"), "go together"),
        (("--npz", "qkv.npz", "--shape", "1,2,3,4"), "leave them out beside files"),
        (("--npz", "missing.npz"), "does not exist"),
        (("--npz", "q.npy"), "expected an .npz archive"),
        (("--q", "qkv.npz", "--k", "k.npy", "--v", "v.npy"), "is an .npz archive"),
        (("--npz", "qkv.npz", "--backward", "--dout", "bias.npy"), "--dout must have out's shape"),
        (("--npz", "qkv.npz", "--mask", "bias.npy"), "mask must be bool"),
    ],
)
def test_run_refuses(words, text, files):
    if text == "passed":
        assert text in run("run", *words)
    else:
        assert text in run("run", *words, code=2)


def test_damaged_and_pickled_files_are_refused(files):
    Path("text.npy").write_text("hello")
    Path("empty.npz").write_bytes(b"")
    Path("cut.npz").write_bytes(Path("qkv.npz").read_bytes()[:-100])
    Path("cut.npy").write_bytes(Path("q.npy").read_bytes()[:-100])
    np.save("pickled.npy", np.array([{}], object), allow_pickle=True)
    np.savez("pickled.npz", q=np.array([{}], object), k=np.zeros((2, 2)), v=np.zeros((2, 2)))
    np.savez("partial.npz", q=np.zeros((2, 2)))
    for name in ("empty.npz", "cut.npz", "pickled.npz"):
        assert f"cannot read {name}" in run("run", "--npz", name, code=2)
    for name in ("text.npy", "cut.npy", "pickled.npy"):
        assert f"cannot read {name}" in run("run", "--q", name, "--k", "k.npy", "--v", "v.npy", code=2)
    assert "no array named k, v; it holds q" in run("run", "--npz", "partial.npz", code=2)
    assert "allow_pickle=False" in run("run", "--npz", "pickled.npz", code=2)


def test_output_is_whole_or_absent_and_never_overwritten_unasked(files, monkeypatch):
    words = ("run", "--npz", "qkv.npz", "--sample", 0, "--output", "out.npz")
    before = set(Path().iterdir())
    with monkeypatch.context() as patch:

        def full_disk(file, **arrays):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        patch.setattr(np, "savez", full_disk)
        assert "No space left on device" in run(*words, code=2)
    assert set(Path().iterdir()) == before
    run(*words)
    content = Path("out.npz").read_bytes()
    assert "out.npz exists: --force overwrites it" in run(*words, "--scale", 3, code=2)
    assert Path("out.npz").read_bytes() == content
    run(*words, "--scale", 3, "--force")
    assert Path("out.npz").read_bytes() != content
    assert set(Path().iterdir()) == before | {Path("out.npz")}
    assert "not a regular file" in run(*words[:-1], ".", "--force", code=2)
    assert "there is no directory" in run(*words[:-1], "no/where.npz", code=2)


# The parts that stand for the whole in run's check


PART_OPTIONS = (
    {},
    {"causal": True, "window": (9, None)},
    {"query_offset": [-3, 4], "causal": True, "q_lengths": [13, 20], "kv_lengths": [15, 2]},
    {"causal": "bottom_right", "q_lengths": [13, 20], "kv_lengths": [15, 2]},
    {"dropout_p": 0.4, "dropout_seed": 5, "dropout_origin": (7, 21, 35), "dropout_offset": 2},
    {"dropout_p": 0.4, "dropout_seed": 5, "dropout_origin": (np.arange(8).reshape(2, 4) * 3, 0, 0)},
    {"softcap": 1.5, "scale": -0.4, "alibi_slopes": np.linspace(0.1, 0.9, 4)},
    {
        "mask": np.random.default_rng(0).random((4, 20, 20)) < 0.7,
        "bias": np.random.default_rng(1).standard_normal((2, 1, 1, 20)),
        "sinks": np.random.default_rng(2).standard_normal((2, 4)),
    },
)


@pytest.mark.parametrize("options", PART_OPTIONS, ids=range(len(PART_OPTIONS)))
def test_parts_are_the_whole_seen_through_a_hole(options):
    q, k, v = qkv(np, 2, 4, 20, d=6, e=5, heads_kv=2, dtype=np.float64)
    problem = Problem.create(q, k, v, **options)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout = normal(np, out.shape, np.float64, 8)
    whole = reference.attention_backward(dout, q, k, v, out, lse, **options)
    rows, columns = sampled_rows(problem, 10**4, 0), sampled_columns(problem, 10**4, 0)
    assert (len(rows), len(columns)) == (2 * 4 * 2, 2 * 2 * 2)
    for part in rows:
        arguments, local = part_arguments(problem, part)
        part_out, part_lse = reference.attention(*arguments, return_lse=True, **local)
        dq = reference.attention_backward(part.of(dout), *arguments, wrt="q", **local).q
        np.testing.assert_allclose(part_out, part.of(out), atol=1e-13)
        np.testing.assert_allclose(part_lse, part.of(lse), atol=1e-13)
        np.testing.assert_allclose(dq, part.of(whole.q), atol=1e-13)
    for part in columns:
        arguments, local = part_arguments(problem, part)
        found = reference.attention_backward(
            part.of(dout), *arguments, part.of(out), part.of(lse), wrt=("k", "v"), **local
        )
        head = part.heads.start // 2
        for name in ("k", "v"):
            expected = getattr(whole, name)[part.item][head : head + 1, part.cols]
            np.testing.assert_allclose(getattr(found, name), expected, atol=1e-13)


def test_the_sample_has_the_first_and_the_last_row():
    problem = Problem.create(*qkv(np, 2, 4, 50, heads_kv=2))
    rows = [(*part.item, part.heads.start, part.rows) for part in sampled_rows(problem, 100, 3)]
    assert rows[0] == (0, 0, slice(0, 16))
    assert rows[-1] == (1, 3, slice(48, 50))
    assert 3 < len(rows) <= 7
    assert sampled_rows(problem, 0, 3) == []


def test_a_lucky_plain_computation_fails_no_sound_result():
    exact = np.linspace(0.5, 1.0, 64).reshape(1, 1, 8, 8)
    sound, wrong = (exact.astype(np.float32) + np.float32(error) for error in (4e-7, 1e-4))
    part = Part((), slice(0, 1), slice(0, 8), slice(0, 8))

    def line(actual):
        plain = lambda order: {"out": exact.astype(np.float32) if order < 3 else sound}  # noqa: E731
        return _judged_together("out", "out", [_Found(part, {"out": actual}, plain, {"out": exact})])

    assert line(sound)["passed"]
    assert not line(wrong)["passed"]
    assert line(wrong)["worst_part"] == "item (), heads 0:1, rows 0:8, keys 0:8"


# check


SMALL_CHECK = ("check", "--shape", "1,2,64,16", "--lengths", "256,512")


def test_check_shows_each_claim_with_its_evidence():
    found = report(*SMALL_CHECK, "--causal", "--heads-kv", 1, "--alibi")
    results = {line["result"]: line for line in found["exactness"]["results"]}
    assert list(results) == ["out", "lse", "dq", "dk", "dv", "dalibi_slopes"]
    assert results["dk"]["values"] == 64 * 16
    assert all(line["plain_error"] > 0 and line["max_error"] <= line["bound"] for line in results.values())
    forward = found["memory"]["forward"]
    assert [line["length"] for line in forward] == [256, 512]
    assert forward[1]["plain_extra_bytes"] >= forward[1]["score_matrices_bytes"] == 2 * 512 * 512 * 4
    assert [line["pass"] for line in found["speed"]["passes"]] == ["forward", "backward"]
    assert found["passed"] is True


def test_check_runs_one_claim_alone():
    found = report(
        *SMALL_CHECK, "--claim", "exactness", "--dtype", "bfloat16", "--dropout-p", 0.2, "--dropout-seed", 1
    )
    assert "memory" not in found
    assert "speed" not in found
    assert found["passed"] is True
    text = run(*SMALL_CHECK, "--claim", "speed")
    assert "times as fast" in text


def test_check_fails_where_a_claim_does(monkeypatch):
    def coarse(*arrays, return_lse=False, **options):
        out, lse = cupyflash.attention(*arrays, return_lse=True, **options)
        return out.astype(np.float16).astype(np.float32), lse

    monkeypatch.setattr(_case, "attention", coarse)
    found = report(*SMALL_CHECK, "--claim", "exactness", code=1)
    assert [line["passed"] for line in found["exactness"]["results"][:2]] == [False, True]
    monkeypatch.setattr(_case, "attention", testing.plain)
    assert report(*SMALL_CHECK, "--claim", "memory", code=1)["memory"]["passed"] is False


@pytest.mark.parametrize("lengths", ["64", "64,64", "64,127", "128,64"])
def test_check_needs_lengths_that_double(lengths):
    assert "at least twice the last" in run("check", "--lengths", lengths, code=2)
