"""Text of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal.api.config import torch_dtype
from areal.plan.layout_plan import LayoutPlan, collective_seconds
from areal.plan.layout_search import PlanJob
from areal.plan.server_update import ServerUpdate
from areal.plan.state_bytes import parameter_shapes
from areal.plan.step_recorder import Collective

_GIB = 2**30


def describe_plan(plan: LayoutPlan, job: PlanJob) -> str:
    """Return the memory, the collectives and the time of a layout, on several lines."""
    config, workload, largest, slowest = plan.config, plan.workload, plan.largest, plan.slowest
    seconds = collective_seconds(slowest.trace.collectives, job.hardware)
    rows = [
        f"{describe_collective(kind)}{calls.count:9.0f}{calls.nbytes / _GIB:11.3f}{seconds[kind]:10.4f}"
        for kind, calls in sorted(slowest.trace.collectives.items(), key=lambda item: -seconds[item[0]])
    ]
    return "\n".join(
        (
            f"{config.backend}, activation_checkpointing = {config.activation_checkpointing}, {slowest.trace.n_mbs} micro-batches of "
            f"{workload.micro_batch:,} tokens",
            "",
            f"peak memory of rank {largest.rank}, GiB",
            *memory_table(largest.trace.memory, job.memory),
            "",
            f"collectives of a step on rank {slowest.rank}",
            f"{COLLECTIVE_HEAD}{'calls':>9}{'GiB':>11}{'seconds':>10}",
            *rows,
            "",
            f"pipeline bubble: {plan.bubble / (1 + plan.bubble):.1%} of the step",
            f"step of {plan.tokens:,} tokens: {plan.seconds:.3f} s; computation {slowest.trace.seconds:.3f} s, communication that it waits for "
            f"{slowest.exposed:.3f} s, communication in its background {slowest.overlapped:.3f} s",
            f"{plan.tokens_per_second:,.0f} tokens/s per rank, {slowest.trace.flops / plan.seconds / 1e12:.0f} TFLOP/s on rank {slowest.rank}",
            _describe_update(plan, job),
        )
    )


COLLECTIVE_HEAD = f"  {'collective':20}{'axis':15}{'ranks':>6}"
"""Head of the columns of :func:`describe_collective`."""


def describe_collective(kind: Collective) -> str:
    """Return the first columns of a table of collectives."""
    return f"  {kind.name:20}{kind.axis:15}{kind.size:6}"


def memory_table(memory: Mapping[str, float], limit: int) -> list[str]:
    """Return the lines of a table of memory: GiB by kind, the largest first, and the total of ``limit`` bytes."""
    rows = [f"  {kind:14}{nbytes / _GIB:10.2f}" for kind, nbytes in sorted(memory.items(), key=lambda x: -x[1])]
    total = sum(memory.values()) / _GIB
    fits = "" if total <= limit / _GIB else ": does not fit"
    return [*rows, f"  {'total':14}{total:10.2f} of {limit / _GIB:g}{fits}"]


def _describe_update(plan: LayoutPlan, job: PlanJob) -> str:
    """Return the time of an update of servers: by rank 0, which sends gathered weights, or by blocks of several ranks."""
    config, hardware = plan.config, job.hardware
    shapes, itemsize = parameter_shapes(job.model), torch_dtype(config.dtype).itemsize
    nbytes = sum(shape.numel() for shape in shapes) * itemsize
    gathered = hardware.collective_seconds("all_gather", nbytes, config.dims.world_size, 1)
    update = ServerUpdate.of(shapes, itemsize, config.dims.world_size, job.servers)
    sent, of_blocks, exchanged = (
        hardware.collective_seconds("send", size, 2, hardware.ranks_per_node) if size else 0.0
        for size in (nbytes, update.sent, update.exchanged)
    )
    return (
        f"update of {job.servers} server{'s' * (job.servers > 1)}, {nbytes / _GIB:.2f} GiB in {config.dtype}: with NCCLCarrier gathered in "
        f"{gathered:.3f} s and sent through the network card of rank 0 in {sent:.3f} s; with ReshardCarrier {update.blocks} ranks send to each "
        f"server, {update.sent / _GIB:.2f} GiB of a rank in {of_blocks:.3f} s, after an exchange of up to {update.exchanged / _GIB:.2f} GiB of "
        f"a rank in {exchanged:.3f} s"
    )


def describe_layouts(plans: Sequence[LayoutPlan], limit: int) -> str:
    """Return a table of layouts."""
    head = f"  {'layout':24}{'recomputed':12}{'micro-batches':>14}{'GiB':>8}{'tokens':>14}{'seconds':>10}{'tokens/s per rank':>20}"
    rows = [
        f"  {plan.config.backend:24}{plan.config.activation_checkpointing:12}{plan.slowest.trace.n_mbs:14}"
        f"{plan.largest.nbytes / _GIB:8.1f}{plan.tokens:14,}{plan.seconds:10.3f}{plan.tokens_per_second:20,.0f}"
        for plan in plans[:limit]
    ]
    return "\n".join((f"best of {len(plans)} layouts that fit", head, *rows)) if plans else "no layout fits"
