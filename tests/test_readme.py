"""README.md: its examples run and are right, its tables are what the committed results say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from cupyflash import attention, attention_vjp
from cupyflash.cli import main
from cupyflash.cuda.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"(?<!-->\n)```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_runs():
    names = {}
    exec(EXAMPLES[0], names)
    assert names["out"].shape == names["grads"].q.shape == (1, 8, 1024, 64)


def test_keys_in_chunks_give_the_whole_calls_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(EXAMPLES[1], names)
    q, k, v, dout = (names[name] for name in ("q", "k", "v", "dout"))
    out, vjp = attention_vjp(q, k, v, dropout_p=0.1, dropout_seed=7)
    np.testing.assert_allclose(names["out"], out, rtol=0, atol=1e-12)
    for name, gradient in zip(("dq", "dk", "dv"), vjp(dout)):
        np.testing.assert_allclose(names[name], gradient, rtol=0, atol=1e-12, err_msg=name)
    assert not np.allclose(out, attention(q, k, v))  # the dropout was not left out


def test_there_are_no_other_examples():
    assert len(EXAMPLES) == 2  # PyTorch's is in test_gpu_interop.py


def test_tables_are_what_the_results_say():
    command = [sys.executable, str(ROOT / "scripts" / "readme_tables.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "python scripts/readme_tables.py writes them"


def rows_of(header):
    """The first cells of a table's rows."""
    table = README[README.index(header) :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_families_stand_in_the_order_of_choice():
    assert rows_of("| family | runs on |") == [family.name for family in FAMILIES]


def test_every_command_is_listed():
    assert sorted(rows_of("| command | what it does |")) == main.list_commands(None)
