"""Text of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from areal.plan.layout_plan import LayoutPlan, collective_seconds
from areal.plan.layout_search import PlanJob

_GIB = 2**30


def describe_plan(plan: LayoutPlan, job: PlanJob) -> str:
    """Return the memory, the collectives and the time of a layout, on several lines."""
    config, workload, largest, slowest = plan.config, plan.workload, plan.largest, plan.slowest
    total = largest.nbytes / _GIB
    memory = [
        f"  {kind:14}{nbytes / _GIB:10.2f}"
        for kind, nbytes in sorted(largest.trace.memory.items(), key=lambda x: -x[1])
    ]
    seconds = collective_seconds(slowest.trace.collectives, job.hardware)
    rows = [
        f"  {kind.name:15}{kind.axis:15}{kind.size:6}{calls.count:9.0f}{calls.nbytes / _GIB:11.3f}{seconds[kind]:10.4f}"
        for kind, calls in sorted(slowest.trace.collectives.items(), key=lambda item: -seconds[item[0]])
    ]
    fits = "" if total <= job.memory / _GIB else ": does not fit"
    return "\n".join(
        (
            f"{config.backend}, activation_checkpointing = {config.activation_checkpointing}, {slowest.trace.n_mbs} micro-batches of "
            f"{workload.micro_batch:,} tokens",
            "",
            f"peak memory of rank {largest.rank}, GiB",
            *memory,
            f"  {'total':14}{total:10.2f} of {job.memory / _GIB:g}{fits}",
            "",
            f"collectives of a step on rank {slowest.rank}",
            f"  {'collective':15}{'axis':15}{'ranks':>6}{'calls':>9}{'GiB':>11}{'seconds':>10}",
            *rows,
            "",
            f"pipeline bubble: {plan.bubble / (1 + plan.bubble):.1%} of the step",
            f"step: {plan.seconds:.3f} s; computation {slowest.trace.seconds:.3f} s, communication that it waits for {slowest.exposed:.3f} s, "
            f"communication in its background {slowest.overlapped:.3f} s",
            f"{plan.tokens_per_second:,.0f} tokens/s per rank, {slowest.trace.flops / plan.seconds / 1e12:.0f} TFLOP/s on rank {slowest.rank}",
        )
    )


def describe_layouts(plans: Sequence[LayoutPlan], limit: int) -> str:
    """Return a table of layouts."""
    head = f"  {'layout':24}{'recomputed':12}{'micro-batches':>14}{'GiB':>8}{'seconds':>10}{'tokens/s per rank':>20}"
    rows = [
        f"  {plan.config.backend:24}{plan.config.activation_checkpointing:12}{plan.slowest.trace.n_mbs:14}"
        f"{plan.largest.nbytes / _GIB:8.1f}{plan.seconds:10.3f}{plan.tokens_per_second:20,.0f}"
        for plan in plans[:limit]
    ]
    return "\n".join((f"best of {len(plans)} layouts that fit", head, *rows)) if plans else "no layout fits"
