#!/usr/bin/env python3
"""Write the measured tables of README.md from the JSON files under scripts/results/: python scripts/readme_tables.py

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end table -->``; with ``--check`` nothing is written and
the exit status says whether README.md is what the files say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"


def load(name: str) -> dict[str, Any]:
    """A committed result."""
    return json.loads((RESULTS / name).read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def run_of(report: dict[str, Any]) -> str:
    """Where and when a run beside other libraries was made, and of which commit."""
    versions = [f"CuPy {report['cupy']}", f"PyTorch {report['torch']}", f"cuDNN {report['cudnn']}"]
    return ", ".join([report["device"], *versions, report["date"], f"commit {report['commit']}"])


def cpu() -> str:
    """Speed of the CPU backend beside the plain computation."""
    report = load("cpu.json")
    rows = [
        [
            row["pass"],
            str(row["threads"]),
            f"{row['seconds']['cupyflash'] * 1e3:.0f} ms",
            f"{row['ratio']['plain']:.2f}",
        ]
        for row in report["rows"]
    ]
    shape = ", ".join(map(str, report["shape"]))
    note = (
        f"{report['cpu']}, NumPy {report['versions']['numpy']}, {report['date']}; arrays ({shape}) "
        f"{report['dtype']}; `python scripts/bench_cpu.py --json scripts/results/cpu.json`."
    )
    return note + "\n\n" + table(["pass", "threads", "cupyflash", "times as fast as plain"], rows)


def gpu() -> str:
    """Speed of the default families and of the portable one beside the plain CuPy computation."""
    default, simt = load("gpu_default.json"), load("gpu_simt.json")
    rows = [
        [row["dtype"], row["pass"], row["kernel"].split()[0]]
        + [f"{x:.1f}" for one in (row, other) for x in (one["tflops"], one["plain_ratio"])]
        for row, other in zip(default["beside_plain"], simt["beside_plain"], strict=True)
    ]
    shape = ", ".join(map(str, default["shape"]))
    note = (
        f"{default['device']}, CUDA driver {default['cuda_driver']}, CuPy {default['cupy']}, "
        f"NVRTC {'.'.join(map(str, default['nvrtc']))}, {default['date']}, commit {default['commit']}, `simt` "
        f"{simt['commit']}; arrays ({shape}); TFLOP/s; `{default['command']}` and `{simt['command']}`."
    )
    head = ["dtype", "pass", "family", "cupyflash", "times plain", "`simt`", "times plain"]
    return note + "\n\n" + table(head, rows)


def peers() -> str:
    """Speed of the default families beside other libraries, bfloat16."""
    report = load("gpu_peers.json")
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["tflops"]))
    rows = [
        [
            row["mode"],
            str(row["D"]),
            str(row["N"]),
            "yes" if row["causal"] else "no",
            *(f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names),
        ]
        for row in report["rows"]
    ]
    note = (
        f"{run_of(report)}; 16384 tokens in all, heads x head dim 2048; TFLOP/s (causal halved, backward x 2.5), "
        "flash is FlashAttention-2."
    )
    return note + "\n\n" + table(["pass", "head dim", "length", "causal", *names], rows)


def order() -> str:
    """The backward with dq in a fixed order and in any, each beside cuDNN in a run of its own."""
    fixed, any_order = load("gpu_peers.json"), load("gpu_any_order.json")
    rows = []
    for row in any_order["rows"]:
        cell = [row[name] for name in ("mode", "D", "N", "causal")]
        [twin] = [x for x in fixed["rows"] if [x[name] for name in ("mode", "D", "N", "causal")] == cell]
        shares = [x["tflops"]["cupyflash"] / x["tflops"]["cudnn"] for x in (twin, row)]
        rows.append(
            [str(row["D"]), str(row["N"]), "yes" if row["causal"] else "no", *(f"{x:.2f}" for x in shares)]
        )
    return table(["head dim", "length", "causal", "in a fixed order", "deterministic=False"], rows)


def sm80() -> str:
    """The mma.sync family as a share of FlashAttention-2, on the same GPU."""
    report, any_order = load("gpu_sm80.json"), load("gpu_sm80_any_order.json")
    assert report["commit"] == any_order["commit"]

    def shares(rows: list[dict[str, Any]], mode: str) -> dict[tuple[Any, ...], str]:
        return {
            (row["D"], row["N"], row["causal"]): f"{row['tflops']['cupyflash'] / row['tflops']['flash']:.2f}"
            for row in rows
            if row["mode"] == mode
        }

    columns = [shares(report["rows"], mode) for mode in ("fwd", "bwd")] + [shares(any_order["rows"], "bwd")]
    rows = [
        [str(cell[0]), str(cell[1]), "yes" if cell[2] else "no", *(column[cell] for column in columns)]
        for cell in columns[0]
    ]
    head = ["head dim", "length", "causal", "forward", "backward", "deterministic=False"]
    return f"{report['device']}, {report['date']}, commit {report['commit']}.\n\n" + table(head, rows)


def wide() -> str:
    """float32 by tensor cores and float64, each beside PyTorch's backend for it."""
    rows, runs = [], set()
    for name, peer, form in (
        ("gpu_float32.json", "efficient", ""),
        ("gpu_ieee.json", "efficient", ", `ieee`"),
        ("gpu_float64.json", "math", ""),
        ("gpu_float64_any_order.json", "math", ", any order"),
    ):
        report = load(name)
        runs.add(run_of(report))
        rows += [
            [
                row["dtype"].replace("fp", "float") + form,
                row["mode"],
                str(row["D"]),
                "yes" if row["causal"] else "no",
                f"{row['tflops']['cupyflash']:.0f}",
                f"{row['tflops'][peer]:.0f} ({peer})",
                f"{row['tflops']['cupyflash'] / row['tflops'][peer]:.2f}",
            ]
            for row in report["rows"]
        ]
    [run] = runs  # of one commit and date
    note = f"{run}; arrays (4, 2048 / head dim, 4096, head dim); float32 in its default precision, `tf32x3`."
    head = ["dtype", "pass", "head dim", "causal", "cupyflash", "PyTorch", "times as fast"]
    return note + "\n\n" + table(head, rows)


def precision() -> str:
    """Errors of float32 in each precision and of float64, beside the float64 reference and the plain computation."""
    report = load("gpu_precision.json")
    names = ("out", "dq", "dk", "dv")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def times_plain(group: list[dict[str, Any]], name: str, which: str) -> str:
        ratio = max(row[name][which] / row[name]["plain_" + which] for row in group)
        return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"

    for row in report["rows"]:
        if " x " in row["inputs"]:  # k or v times something: in the file alone
            continue
        kind = row["precision"] or ("tf32x3" if row["dtype"] == "float32" else "")
        way = f"{row['dtype']} {kind}".strip() + f" (`{row['family']}`)"
        groups.setdefault((row["inputs"], way), []).append(row)
    rows = [
        [
            inputs,
            way,
            " / ".join(f"{max(row['out'][which] for row in group):.1e}" for which in ("max", "rms")),
            *(" / ".join(times_plain(group, name, which) for which in ("max", "rms")) for name in names),
        ]
        for (inputs, way), group in groups.items()
    ]
    note = (
        f"{report['device']}, CuPy {report['cupy']}, NVRTC {'.'.join(map(str, report['nvrtc']))}, {report['date']}, "
        f"commit {report['commit']}; arrays (1, 2, {report['length']}, 64 and 128, the worse of both); largest / rms "
        "error of out, and errors of each result as multiples of those of the plain computation; "
        "`python scripts/precision_gpu.py > scripts/results/gpu_precision.json`."
    )
    return note + "\n\n" + table(["inputs", "precision", "error of out", *names], rows)


def options() -> str:
    """What single options cost, in milliseconds, beside the others."""
    report = load("gpu_options.json")
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["seconds"]))
    rows = []
    for row in report["rows"]:
        causal = "causal=1" in row["label"]
        option = row["label"].split("causal=")[1][1:].strip() or "plain"
        times = [f"{row['seconds'][name] * 1e3:.2f}" if name in row["seconds"] else "" for name in names]
        heads = f"{row['HQ']} over {row['HK']}" if row["HQ"] != row["HK"] else str(row["HQ"])
        rows.append([row["mode"], str(row["D"]), heads, option + (", causal" if causal else ""), *times])
    note = (
        f"{run_of(report)}; bfloat16, batch 4, length 4096; milliseconds; dropout 0.1, window 512, softcap 30, the "
        "bias full, in the backward with its gradient."
    )
    return note + "\n\n" + table(["pass", "head dim", "heads", "option", *names], rows)


def decode() -> str:
    """One query row against a long cache, in bytes of keys and values a second."""
    report = load("gpu_decode.json")
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["seconds"]))
    rows = []
    for row in report["rows"]:
        kv_bytes = 2 * 2 * row["B"] * row["HK"] * row["N"] * row["D"]
        speeds = [f"{kv_bytes / row['seconds'][name] / 1e12:.2f}" for name in names]
        rows.append([f"{row['B']}", f"{row['HQ']} over {row['HK']}", str(row["N"]), str(row["D"]), *speeds])
    note = f"{run_of(report)}; bfloat16, `sm80`; TB/s of keys and values."
    return note + "\n\n" + table(["batch", "heads", "keys", "head dim", *names], rows)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (cpu, gpu, peers, order, sm80, wide, precision, options, decode)
}


def main() -> None:
    """Rewrite, or with --check compare."""
    path = ROOT / "README.md"
    text = path.read_text()

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end table -->"

    filled = re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end table -->", fill, text, flags=re.DOTALL)
    if "--check" in sys.argv[1:]:
        sys.exit(filled != text)
    path.write_text(filled)


if __name__ == "__main__":
    main()
