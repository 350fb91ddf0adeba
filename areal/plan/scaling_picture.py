"""Picture of weak scaling: the rate of a rank in larger and larger worlds."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from areal.plan.layout_plan import LayoutPlan


def save_scaling(plans: list[LayoutPlan], file: Path, title: str) -> None:
    """Draw tokens per second and rank over the number of ranks, each with its ratio to those of the smallest world.

    Args:
        plans: plans of one layout with more and more data-parallel ranks.
        file: file to write; its suffix is the format, such as ``.svg``.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot()
    ranks = [plan.config.dims.world_size for plan in plans]
    left.plot(ranks, [plan.tokens_per_second for plan in plans], marker="o")
    for plan, x in zip(plans, ranks, strict=True):
        efficiency = plan.tokens_per_second / plans[0].tokens_per_second
        left.annotate(f"{efficiency:.0%}", (x, plan.tokens_per_second), textcoords="offset points", xytext=(0, 8))
    left.set_xscale("log", base=2)
    left.set_xticks(ranks, [f"{x:,}" for x in ranks])
    left.set_ylim(bottom=0, top=1.2 * max(plan.tokens_per_second for plan in plans))
    left.set_xlabel("ranks")
    left.set_ylabel("tokens/s per rank")
    left.set_title(title)
    left.grid(alpha=0.3)
    figure.savefig(file)
