"""``cupyflash bench``: what it reports and what it refuses. It times; nothing here judges the times."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cupyflash.cli import main


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "--backend", "cpu", "--rounds", "1", *arguments])


def test_the_table_compares_libraries_pass_by_pass():
    result = bench("--shape", "1,2,40,8", "--causal", "--dtype", "float16", "--dtype", "float64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    rows = report["times"]
    assert [(row["dtype"], row["pass"], row["library"]) for row in rows] == [
        (dtype, name, library)
        for dtype in ("float16", "float64")
        for name in ("forward", "backward")
        for library in ("cupyflash", "plain")
    ]
    flops = {"forward": 2 * 2 * 2 * 820 * 8, "backward": 5 * 2 * 2 * 820 * 8}
    for row in rows:
        rate = row["tflop_per_second"] * 1e12
        assert rate * row["median_seconds"] == pytest.approx(flops[row["pass"]])
        assert row["roofline_share"] is None
        assert (row["plain_ratio"] == 1) == (row["library"] == "plain")
        assert (row["kernel"] is None) == (row["library"] == "plain")
    assert report["machine"]["device"] == "cpu"


def test_a_named_gpu_gives_the_share_of_its_roofline():
    result = bench("--shape", "16,8", "--pass", "forward", "--no-plain", "--gpu", "A100-80GB", "--json")
    [row] = json.loads(result.output)["times"]
    bound = max(2 * 2 * 16 * 16 * 8 / 19.5e12, (4 * 16 * 8 * 4 + 16 * 4) / 2039e9)
    assert row["roofline_share"] == pytest.approx(bound / row["median_seconds"])
    assert row["plain_ratio"] is None


def test_the_plot_is_written_and_not_over_a_file(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    target = tmp_path / "bench.png"
    arguments = ("--shape", "16,8", "--pass", "forward", "--plot", str(target))
    assert bench(*arguments).exit_code == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    again = bench(*arguments)
    assert again.exit_code == 2
    assert "--force" in again.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--shape", "8"), "--shape needs at least length,head_dim"),
        (("--window", "3,3", "--seqlen-k", "7", "--shape", "16,8"), "a window speaks of positions"),
        (("--dropout-p", "2", "--shape", "16,8"), "dropout_p must lie in [0, 1]"),
    ],
)
def test_bad_requests_are_usage_errors(arguments, text):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_no_gpu_is_a_usage_error():
    from cupyflash.cuda import device

    if device.missing() is None:
        pytest.skip("needs a machine without a GPU")
    result = CliRunner().invoke(main, ["bench", "--backend", "cuda", "--shape", "16,8"])
    assert result.exit_code == 2
    assert "not available" in result.output
