"""Output of a run: tables as text, everything as JSON, and a picture."""

from __future__ import annotations

import json
import platform
import re
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks.driver import Run
from benchmarks.machine import cores, cpu_name
from benchmarks.reference import LOGPROBS, LOSSES, NORMS
from benchmarks.table import Entry, entries

COLUMNS = ["row", "ranks", "ratio", "tokens/CPU-s", "GEMM share", "peak MB", "rise MB", "wall against 1 rank"]
SUMMARY_COLUMNS = ["row", "training step", "peak MB", "log-probs"]
NUMBERS_COLUMNS = ["row", "ranks", "loss of steps 1 to 3", "gradient norm of steps 1 to 3", ""]


def heading(run: Run) -> str:
    """Return one line that describes the measurement."""
    work = run.workload
    crowded = "; free memory handed back after each turn" if run.crowded else ""
    return (
        f"{work.name}: {len(work.lengths)} sequences, {work.tokens:,} tokens, {work.trained_tokens:,} of them trained, "
        f"micro-batches of at most {work.max_tokens_per_mb:,}; {run.task.dtype}, {len(run.gemm_rates)} rounds, "
        f"GEMM {statistics.median(run.gemm_rates) / 1e9:.0f} GFLOP per CPU-second{crowded}"
    )


def text(run: Run) -> str:
    """Return the tables in Markdown."""
    train, forward = entries(run, "train"), entries(run, "forward")
    losses, norms, nats = (bounds[run.task.dtype] for bounds in (LOSSES, NORMS, LOGPROBS))
    return "\n".join(
        [
            heading(run),
            "",
            "A training step: speed as a ratio to the hand-written loop on as many ranks, medians over rounds (lowest to highest).",
            "",
            _markdown(COLUMNS, [_speed(entry) for entry in train]),
            "",
            f"Its numbers, losses within {losses:g} and norms within {norms:g} of float64, or wrong.",
            "",
            _markdown(NUMBERS_COLUMNS, [_numbers(entry) for entry in train]),
            "",
            f"Log-probs without a gradient, within {nats:g} nats of float64 or wrong.",
            "",
            _markdown(COLUMNS, [_speed(entry) for entry in forward]),
            "",
        ]
    )


def _speed(entry: Entry) -> list[str]:
    if entry.tokens_per_cpu_second is None:
        return [entry.row, str(entry.ranks), "did not run", *[""] * 5]
    ratio = "WRONG" if entry.wrong else str(entry.ratio or "")
    return [
        entry.row,
        str(entry.ranks),
        ratio,
        f"{entry.tokens_per_cpu_second.median:,.0f}",
        f"{entry.gemm_share:.2f}",
        f"{entry.peak_mb:,.0f}",
        f"{entry.rise_mb:,.0f}",
        str(entry.wall_ratio or ""),
    ]


def _numbers(entry: Entry) -> list[str]:
    losses = " ".join(f"{x:.7g}" for x in entry.losses)
    return [entry.row, str(entry.ranks), losses, " ".join(f"{x:.7g}" for x in entry.grad_norms), entry.wrong or "right"]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose columns line up in plain text too."""
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    lines = [list(columns), ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines
    )


def summary(run: Run, day: date) -> str:
    """Return the table for a page of the docs, in Markdown: where and what was measured, and the ratios without wrong rows."""
    forward = {(entry.row, entry.ranks): entry for entry in entries(run, "forward")}
    rows = [
        [entry.row, str(entry.ratio), f"{entry.peak_mb:,.0f}", _ratio(forward.get((entry.row, entry.ranks)))]
        for entry in entries(run, "train")
        if entry.ratio and entry.wrong is None
    ]
    many = f"{cores()} cores" if cores() > 1 else "one core"
    where = f"On {day.isoformat()}, on {many} of {cpu_name()}, one thread of torch per rank; {heading(run)}."
    return f"{textwrap.fill(where, 100)}\n\n{_markdown(SUMMARY_COLUMNS, rows)}"


def _ratio(entry: Entry | None) -> str:
    return str(entry.ratio) if entry is not None and entry.ratio and entry.wrong is None else ""


def put_into(page: Path, name: str, table: str) -> None:
    """Replace the table of a workload in a page of the docs: what is between ``<!-- benchmark NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: the page does not have these lines.
    """
    before, after = f"<!-- benchmark {name} -->\n", "\n<!-- end -->"
    pattern = re.compile(f"({re.escape(before)}).*?({re.escape(after)})", re.DOTALL)
    found = page.read_text()
    if not pattern.search(found):
        raise ValueError(
            f"docs = {page}: add the lines {before.strip()} and {after.strip()}, between which the table belongs"
        )
    page.write_text(pattern.sub(lambda match: f"{match[1]}{table}{match[2]}", found))


def as_json(run: Run) -> dict[str, Any]:
    """Return all measurements and the tables computed from them."""
    return {
        "heading": heading(run),
        "task": asdict(run.task),
        "cpu": cpu_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "matrix_parameters": run.matrix_parameters,
        "crowded": run.crowded,
        "gemm_flop_per_cpu_second": run.gemm_rates,
        "reference": {"losses": run.reference.losses, "grad_norms": run.reference.grad_norms},
        "train": [asdict(entry) for entry in entries(run, "train")],
        "forward": [asdict(entry) for entry in entries(run, "forward")],
        "turns": [
            {
                "row": c.label,
                "ranks": c.task.ranks,
                "steps": list(map(asdict, c.steps)),
                "forwards": list(map(asdict, c.forwards)),
            }
            for c in run.contestants
        ],
    }


def draw(run: Run, path: Path) -> None:
    """Draw bars of the ratios and of the memory of a training step, without the wrong rows."""
    rows = [entry for entry in entries(run, "train") if entry.ratio and entry.wrong is None]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 1.6 + 0.36 * len(rows)), sharey=True, layout="constrained", width_ratios=(3, 2)
    )
    names = [f"{entry.row}{', 2 ranks' if entry.ranks == 2 and 'd2' not in entry.row else ''}" for entry in rows]
    ratios = [entry.ratio for entry in rows if entry.ratio]
    colours = ["tab:blue" if name.startswith("areal") else "tab:grey" for name in names]
    errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    left.barh(range(len(rows)), [r.median for r in ratios], xerr=errors, color=colours, capsize=2)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_yticks(range(len(rows)), names)
    left.invert_yaxis()
    left.set_xlabel("tokens per CPU-second, against the hand-written loop")
    right.barh(range(len(rows)), [entry.rise_mb or 0.0 for entry in rows], color=colours)
    right.set_xlabel("peak memory of a rank above its start (MB)")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"{run.workload.name}, {run.workload.tokens:,} tokens, {run.task.dtype}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(run: Run, stem: Path) -> None:
    """Print the tables, and write ``stem`` with ``.md``, ``.json`` and ``.png``."""
    tables = text(run)
    print(tables, flush=True)
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(tables)
    stem.with_suffix(".json").write_text(json.dumps(as_json(run), indent=1, allow_nan=True))
    draw(run, stem.with_suffix(".png"))
