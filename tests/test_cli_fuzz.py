"""Whatever is typed: never a traceback, and no exit code but 0, 1 and 2."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.cli import main
from cupyflash.cuda import module

COMMANDS = main.list_commands(None)
FILES = (
    "good.npz",
    "q.npy",
    "mask.npy",
    "pickled.npy",
    "empty.npy",
    "text.npz",
    "missing.npy",
    ".",
    "out.png",
)
EXTREMES = (
    "0",
    "-1",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "9223372036854775807",
    "-9223372036854775808",
    "4294967296",
)
WORDS = (
    "true",
    "bottom_right",
    "top_left",
    "none",
    "float16",
    "bfloat16",
    "float64",
    "tf32",
    "ieee",
    "cpu",
    "H200",
)
# Numbers that say how large or how often: the fuzz keeps them small, as any machine must do the work.
SIZED = {
    "--shape",
    "--seqlen-k",
    "--lengths",
    "--rounds",
    "--repeat",
    "--sample",
    "--heads-kv",
    "--head-dim-v",
    "--dtype",
}

# Values that the options often take; the rest of the time they get anything.
SMALL = st.integers(0, 12).map(str)
PLAUSIBLE = {
    "--window": st.sampled_from(["3,0", "0,0", "none,2", ",", "9999999999999999999999,1"]),
    "--query-offset": st.integers(-9, 9).map(str) | st.sampled_from(["1,2", "9223372036854775807"]),
    "--q-lengths": SMALL | st.just("3,5"),
    "--kv-lengths": SMALL | st.just("3,5"),
    "--dropout-p": st.sampled_from(["0", "0.5", "1", "1e-9"]),
    "--dropout-seed": st.sampled_from(["0", "7", "18446744073709551615"]),
    "--dropout-offset": st.sampled_from(["0", "7", "4294967295"]),
    "--dropout-origin": st.sampled_from(["0,0,0", "4294967290,1,2", "5,2147483647,2147483647"]),
    "--scale": st.sampled_from(["0", "-2", "1e30", "1e-300"]),
    "--softcap": st.sampled_from(["1e-3", "50", "1e300"]),
    "--causal": st.sampled_from(["true", "top_left", "bottom_right"]),
    "--alibi": st.sampled_from(["geometric", "bias.npy"]),
    "--npz": st.just("good.npz"),
    "--q": st.just("q.npy"),
    "--k": st.just("q.npy"),
    "--v": st.just("q.npy"),
    "--dout": st.just("q.npy"),
    "--mask": st.just("mask.npy"),
    "--bias": st.just("bias.npy"),
    "--sinks": st.just("sinks.npy"),
    "--dtype": st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    "--precision": st.sampled_from(["ieee", "tf32x3", "tf32"]),
    "--gpu": st.sampled_from(["V100", "h200"]),
    "--shape": st.sampled_from(["1,2,9,4", "2,4,6,4", "6,4", "0,2,3,4", "2,1,0,4"]),
    "--lengths": st.sampled_from(["8,16", "9,20,41"]),
    "--heads-kv": st.sampled_from(["1", "2"]),
    "--backend": st.just("cpu"),
    "--arch": st.sampled_from(["60", "75,80", "37", "1000"]),
    "--head-dim": st.sampled_from(["1", "64", "48,300"]),
    "--option": st.sampled_from(["causal", "bias", "dropout", "all"]),
    "--family": st.sampled_from(["simt", "sm80", "sm90", "none"]),
    "--pass": st.sampled_from(["forward", "backward"]),
    "--rounds": st.sampled_from(["1", "2"]),
    "--claim": st.sampled_from(["exactness", "memory", "speed"]),
    "--scores": st.just("1000,1001,-inf,nan"),
    "--values": st.just("2,4,8,1"),
    "--output": st.just("out.npz"),
    "--plot": st.just("out.png"),
}

small_shapes = st.lists(st.integers(-1, 9), min_size=1, max_size=5).map(lambda x: ",".join(map(str, x)))
integers = st.integers(-(2**70), 2**70).map(str) | st.integers(-3, 20).map(str)
pairs = st.tuples(integers | st.just(""), integers | st.just("none")).map(",".join)
numbers = st.floats().map(repr)
anything = (
    st.sampled_from(FILES + EXTREMES + WORDS)
    | integers
    | pairs
    | numbers
    | small_shapes
    | st.text(max_size=8)
)


@pytest.fixture(scope="module", autouse=True)
def directory():
    """A working directory with good and bad files in it."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        q = np.random.default_rng(0).standard_normal((2, 4, 6, 4)).astype(np.float32)
        np.savez("good.npz", q=q, k=q[:, :2], v=q[:, :2])
        np.save("q.npy", q)
        np.save("mask.npy", np.arange(36).reshape(6, 6) % 3 > 0)
        np.save("bias.npy", q[0, :, 0, :1] * 300)
        np.save("sinks.npy", q[0, :, 0, 0])
        np.save("pickled.npy", np.array([{}], object), allow_pickle=True)
        Path("empty.npy").write_bytes(b"")
        Path("text.npz").write_text("PK\x03\x04 not quite")
        yield
        os.chdir(home)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled():
    """`compile` stops short of the compiler, which takes seconds a kernel."""

    def compile_offline(config, cc):
        return module.Report(config, config.arch(cc), 1, 0, 0, config.shared_bytes, 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_offline", compile_offline)
        yield


def options_of(name):
    """Every option's longest spelling, with whether it takes a value."""
    command = main.get_command(click.Context(main), name)
    return [(max(p.opts, key=len), not p.is_flag) for p in command.params if isinstance(p, click.Option)]


@st.composite
def command_lines(draw):
    """A command with some of its options: in half of the lines all values are likely ones."""
    name = draw(st.sampled_from(COMMANDS))
    wild = draw(st.booleans())
    words = [name]
    if name == "check":
        words += ["--shape", "1,2,9,4", "--lengths", "8,16"]
    if name == "bench":
        words += ["--shape", "1,2,9,4", "--backend", "cpu", "--rounds", "1"]
    if name == "compile":
        words += ["--arch", draw(st.sampled_from(["75", "90", "37", "80,120"]))]
    if name == "run":
        words += draw(st.sampled_from([["--shape", "1,2,9,4"], ["--npz", "good.npz"]]))
    choices = options_of(name) + [("--help", False), ("--unknown", False)] * wild
    for option, takes_value in draw(st.lists(st.sampled_from(choices), max_size=6, unique=not wild)):
        words.append(option)
        if takes_value:
            likely = PLAUSIBLE.get(option, SMALL)
            small = small_shapes | st.text(max_size=3)
            value = likely if not wild else likely | (small if option in SIZED else anything)
            words += draw(st.lists(value, min_size=not wild, max_size=1))
    return words


def end(words):
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
    assert result.exit_code in (0, 1, 2), (words, result.exit_code)
    assert "Traceback" not in result.output
    return result


@settings(max_examples=100)
@given(command_lines())
def test_no_command_line_ends_in_a_traceback(words):
    result = end(words)
    if result.exit_code == 2:
        assert "Error" in result.output


@settings(max_examples=40)
@given(st.lists(st.sampled_from(COMMANDS) | anything, max_size=4))
def test_no_words_end_in_a_traceback(words):
    if not {"bench", "check", "compile", "run"} & set(words):  # with their defaults these are long
        end(words)
