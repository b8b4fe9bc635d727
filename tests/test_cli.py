"""The command line: what it prints is what the API computes, and what it must refuse it refuses.

`run` and `check` are in test_cli_run.py, `bench` in test_cli_bench.py.
"""

from __future__ import annotations

import io
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from command_line import report, run

import cupyflash
from cupyflash.cli import main
from cupyflash.cli._report import steps
from cupyflash.cuda import device

PNG = b"\x89PNG\r\n\x1a\n"
ROOT = Path(__file__).resolve().parent.parent


def examples(name):
    text = main.get_command(click.Context(main), name).epilog
    return [shlex.split(line)[2:] for line in text.splitlines() if line.strip().startswith("cupyflash ")]


def test_every_command_has_help_with_examples():
    listed = run("--help")
    for name in main.list_commands(None):
        assert name in listed
        assert "Examples:\n    cupyflash " in run(name, "--help")


@pytest.mark.parametrize("name", main.list_commands(None))
def test_the_examples_of_the_help_are_valid(name, files):
    command = main.get_command(click.Context(main), name)
    for words in examples(name):
        command.make_context(name, words)


def test_version_and_unknown_command():
    assert run("--version") == f"cupyflash {cupyflash.__version__}\n"
    assert "No such command 'fly'" in run("fly", code=2)
    assert "_files" not in run("--help")


@pytest.mark.parametrize("start", [["-m", "cupyflash"], [str(ROOT / "scripts" / "quick_run.py")]])
def test_it_starts_as_a_module_and_from_a_checkout(start, tmp_path):
    done = subprocess.run(
        [sys.executable, *start, "online", "--json"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert round(json.loads(done.stdout)["out"], 4) == 3.8707


def test_help_imports_neither_cupy_nor_matplotlib():
    code = (
        "import sys; from cupyflash.cli import main; main(['--help'], standalone_mode=False); "
        "print(sorted({'cupy', 'matplotlib', 'torch', 'ml_dtypes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(steps([3, 1, 2], "counting")) == [3, 1, 2]
        assert ("counting" in stream.getvalue() and "100%" in stream.getvalue()) is shown


def test_cuda_without_a_gpu_says_what_is_missing():
    if device.missing() is None:
        pytest.skip("there is a GPU")
    for command in ("run", "check"):
        assert "backend='cuda' is not available" in run(command, "--backend", "cuda", code=2)


# online


def test_online_shows_the_worked_example():
    steps = report("online")["steps"]
    assert [round(step["u/l"], 4) for step in steps] == [2.0, 3.4621, 3.8707]
    assert [step["m"] for step in steps] == [1000, 1001, 1001]
    weights = np.exp([-1.0, 0.0, -2.0])
    assert math.isclose(steps[-1]["l"], weights.sum())
    assert math.isclose(report("online")["lse"], 1001 + math.log(weights.sum()))
    assert "3.87067" in run("online")


def test_online_blocks_change_nothing_but_the_steps():
    words = ("online", "--scores", "1,2,3,-inf,5", "--values", "1,0,0,7,1")
    whole, pairs = report(*words, "--block", 9), report(*words, "--block", 2)
    assert (len(whole["steps"]), len(pairs["steps"])) == (1, 3)
    assert pairs["steps"][1]["block"] == [3.0, "-inf"]
    weights = np.exp([1.0, 2, 3, -np.inf, 5])
    assert math.isclose(pairs["out"], weights @ [1, 0, 0, 7, 1] / weights.sum())
    assert math.isclose(pairs["out"], whole["out"])


def test_online_of_nothing_but_hidden_keys():
    hidden = report("online", "--scores=-inf,-inf", "--values", "1,2")
    assert (hidden["out"], hidden["lse"]) == (0, "-inf")


# mask


def test_mask_prints_who_sees_whom():
    text = run("mask", "--shape", "3,5", "--causal", "bottom_right", "--window", "1,0")
    assert text.splitlines()[-3:] == ["0 1 1 0 0", "0 0 1 1 0", "0 0 0 1 1"]
    found = report(
        "mask", "--shape", "4,3", "--query-offset", "-1", "--causal", "--kv-lengths", 2, "--q-lengths", 3
    )
    assert found["mask"] == ["000", "100", "110", "000"]
    assert (found["allowed"], found["rows_that_see_nothing"]) == (3, 2)


def test_mask_includes_dropout():
    found = report(
        "mask", "--shape", "20,40", "--causal", "top_left", "--dropout-p", 0.4, "--dropout-seed", 2**40,
        "--dropout-offset", 3, "--dropout-origin", "5,16,7",
    )  # fmt: skip
    kept = cupyflash.dropout_mask((1, 20, 40), 0.4, 2**40, 3, (5, 16, 7))[0] & np.tri(20, 40, dtype=bool)
    assert found["mask"] == ["".join(map(str, row)) for row in kept.astype(int)]
    assert found["kept"] == kept.sum()
    assert "dropout_seed is required" in run("mask", "--dropout-p", 0.5, code=2)


def test_mask_plots_what_is_too_large_for_text(tmp_path):
    assert "use --plot" in run("mask", "--shape", "100,100", code=2)
    picture = tmp_path / "mask.png"
    run("mask", "--shape", "100,100", "--causal", "--dropout-p", 0.1, "--dropout-seed", 1, "--plot", picture)
    assert picture.read_bytes().startswith(PNG)
    assert "too many" in run("mask", "--shape", "100000,100000", "--plot", picture, "--force", code=2)


# estimate


def test_estimate_of_the_usual_lengths():
    short = report("estimate", "--shape", "1,1,8192,64")
    assert short["score_matrix_bytes"] == 128 * 2**20
    assert "128 MiB" in run("estimate", "--shape", "1,1,8192,64")
    long = report("estimate", "--shape", "1,2,100000,64", "--causal")
    assert long["score_matrix_bytes"] == 20 * 10**9
    assert long["all_score_matrices_bytes"] == 40 * 10**9
    assert "20 GB" in run("estimate", "--shape", "1,1,100000,64")
    assert long["flops"] == 2 * 4 * 64 * 100_000 * 100_001 // 2
    naive, tiled, once = long["algorithms"]
    assert naive["flops"] == 2 * 4 * 64 * 100_000**2
    assert naive["bytes"] > 4 * 40 * 10**9 > 100 * once["bytes"]
    assert once["bytes"] < tiled["bytes"] < naive["bytes"] / 4
    assert naive["peak_memory_bytes"] == once["peak_memory_bytes"] + 40 * 10**9


def test_estimate_bounds_the_time_on_a_gpu():
    found = report("estimate", "--shape", "1,16,4096,128", "--gpu", "h100-sxm")
    flops = 4 * 16 * 4096**2 * 128
    once = found["roofline"]["bounds"][2]
    assert (once["limit"], once["algorithm"]) == ("compute", "once")
    assert math.isclose(once["at_least_seconds"], flops / 989.4e12)
    assert found["roofline"]["bounds"][0]["limit"] == "memory"
    given = report("estimate", "--shape", "1,16,4096,128", "--peak-tflops", 989.4, "--bandwidth", 3350)
    assert given["roofline"]["bounds"] == found["roofline"]["bounds"]


def test_estimate_takes_the_peak_of_the_precision():
    def peak(*words):
        found = report("estimate", "--dtype", "float32", "--gpu", "A100-80GB", *words)
        return found["roofline"]["peak_flops_per_second"] / 1e12

    assert peak() == 19.5
    assert peak("--precision", "tf32") == 156
    assert math.isclose(peak("--precision", "tf32x3"), 52)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--gpu", "V100", "--dtype", "bfloat16"), "V100: this GPU has no bfloat16 products"),
        (("--gpu", "H200", "--peak-tflops", 5), "not both"),
        (("--bandwidth", 5), "go together"),
        (("--plot", "roof.png"), "give --gpu"),
        (("--shape", "64"), "at least length,head_dim"),
        (("--seqlen-k", 9, "--causal"), "bottom_right"),
        (("--heads-kv", 3), "multiple of heads_kv"),
    ],
)
def test_estimate_refuses(words, text):
    assert text in run("estimate", *words, code=2)


def test_estimate_plots_the_roofline(tmp_path):
    picture = tmp_path / "roof.png"
    run("estimate", "--gpu", "B200", "--backward", "--plot", picture)
    assert picture.read_bytes().startswith(PNG)
    assert "--force overwrites it" in run("estimate", "--gpu", "B200", "--plot", picture, code=2)


def test_plots_without_matplotlib_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for words in (("mask",), ("estimate", "--gpu", "T4")):
        assert "pip install 'cupyflash[plot]'" in run(*words, "--plot", tmp_path / "x.png", code=2)
    assert not list(tmp_path.iterdir())


# info


def test_info_says_what_is_there():
    found = report("info")
    assert found["packages"]["numpy"] == np.__version__
    assert found["cpu_backend"]["available"] is True
    assert found["cuda_backend"]["available"] == ("cuda" in cupyflash.available_backends())
    assert f"cupyflash     {cupyflash.__version__}" in run("info")


def test_info_says_why_there_is_no_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = report("info")["cuda_backend"]
    assert found["available"] is False
    assert "CuPy is not installed" in found["reason"]
    assert "cupyflash[cuda12]" in found["reason"]
