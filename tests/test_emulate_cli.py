"""``cupyflash check --emulate``: the kernels that ran, their errors, and a fault as a failed check."""

from __future__ import annotations

import json
from functools import partial

from click.testing import CliRunner
from emulated import needs_compiler

from cupyflash.cli import _case, main
from cupyflash.cuda.emulate import Machine

pytestmark = needs_compiler

SMALL = ("--shape", "1,2,70,24", "--head-dim-v", "40")


def invoke(*words):
    return CliRunner().invoke(main, ["check", "--emulate", *words])


def test_it_compares_the_kernels_with_the_reference():
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["exactness"]
    assert [name.split()[1] for name in found["kernels"]] == ["forward", "delta", "backward_kv", "backward_q"]
    assert [line["result"] for line in found["results"]] == ["out", "lse", "dq", "dk", "dv"]
    assert all(0 < line["max_error"] <= line["bound"] for line in found["results"])


def test_a_fault_fails_the_check_and_is_shown(monkeypatch):
    def edit(text):
        return text.replace("work.lse.at(row, 0)", "work.lse.at(row + 1, 0)")

    monkeypatch.setattr(_case, "Machine", partial(Machine, edit=edit))
    result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "beyond the end of lse, at simt/forward.cu" in result.output


def test_it_has_no_timing():
    result = invoke("--claim", "speed")
    assert result.exit_code == 2
    assert "it checks --claim exactness alone" in result.output
