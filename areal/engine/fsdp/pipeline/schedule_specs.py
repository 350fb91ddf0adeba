"""The pipeline schedules of the FSDP engine and their requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from areal.api.config import TrainEngineConfig
from areal.api.parallel import ParallelDims
from areal.utils.releases import require_release


@dataclass(frozen=True)
class ScheduleSpec:
    """A pipeline schedule.

    Attributes:
        name: name in :mod:`torch.distributed.pipelining`.
        source: paper that describes it.
        chunks: number of stages on each rank: ``"one"``, ``"two"``, or ``"several"``.
        back: if True, stages go through the ranks and back, so that the first rank has the first and the last
            stage.
        zero_bubble: if True, gradients of weights are computed separately from those of inputs.
        rounds: if True, the number of micro-batches must be a multiple of the number of ranks.
        fills: if True, there must be at least as many micro-batches as ranks.
        all_forwards_first: if True, the first backward comes after the last forward.
    """

    name: str
    source: str
    chunks: str = "several"
    back: bool = False
    zero_bubble: bool = False
    rounds: bool = False
    fills: bool = False
    all_forwards_first: bool = False

    @property
    def torch_class(self) -> Any:
        """The schedule's class in torch."""
        return torch_schedules.get_schedule_class(self.name)

    def round_up(self, n: int, ranks: int) -> int:
        """Return the smallest number of micro-batches, at least ``n``, that the schedule can run."""
        return -(-n // ranks) * ranks if self.rounds else max(n, ranks) if self.fills else n

    def rank_of(self, stage: int, ranks: int) -> int:
        """Return the pipeline rank of a stage."""
        turn, position = divmod(stage, ranks)
        # Schedules that go back pass the ranks in reverse every second time.
        return ranks - 1 - position if self.back and turn % 2 else position


SCHEDULE_SPECS: Mapping[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec("GPipe", "Huang et al., 2019", chunks="one", all_forwards_first=True),
        ScheduleSpec("1F1B", "Narayanan et al., 2019", chunks="one", fills=True),
        ScheduleSpec("Interleaved1F1B", "Narayanan et al., 2021", rounds=True),
        ScheduleSpec("InterleavedZeroBubble", "Qi et al., 2023", zero_bubble=True, rounds=True),
        ScheduleSpec("ZBVZeroBubble", "Qi et al., 2024", chunks="two", back=True, zero_bubble=True),
    )
}
"""Schedules by the name in ``FSDPConfig.pipeline_schedule``."""


def choose_schedule(config: TrainEngineConfig) -> ScheduleSpec:
    """Return the configured schedule, or the default one of the layout.

    Raises:
        ValueError: the schedule does not fit the layout or another setting; names both.
    """
    dims, fsdp = config.dims, config.fsdp
    spec = SCHEDULE_SPECS[fsdp.pipeline_schedule or ("1F1B" if dims.vpp == 1 else "Interleaved1F1B")]
    # Without a pipeline, settings of one are an error.
    if dims.pp == 1:
        if fsdp.pipeline_schedule is not None or dims.vpp > 1:
            given = f"fsdp.pipeline_schedule = {spec.name!r}" if fsdp.pipeline_schedule else f"v{dims.vpp}"
            raise ValueError(
                f"{given} with backend = '{dims}': a schedule is for pipelines; add p to the layout, or leave it out"
            )
        return spec
    # The layout must have as many chunks per rank as the schedule runs.
    fits = {"one": dims.vpp == 1, "two": dims.vpp == 2, "several": dims.vpp > 1}[spec.chunks]
    if not fits:
        needs = {"one": "no v", "two": "v2", "several": "v2 or more"}[spec.chunks]
        raise ValueError(
            f"fsdp.pipeline_schedule = {spec.name!r} with backend = '{dims}': it needs {needs} in the layout"
        )
    # Limits of schedules that split the backward in two.
    if spec.zero_bubble:
        # Before that, they read an attribute of autograd functions that FSDP's do not have.
        require_release("torch", (2, 13), f"fsdp.pipeline_schedule = {spec.name!r}")
    apart = f"fsdp.pipeline_schedule = {spec.name!r} computes gradients of weights apart from those of inputs, which"
    if spec.zero_bubble and fsdp.reshard_after_forward:
        raise ValueError(f"{apart} needs gathered weights: leave fsdp.reshard_after_forward out")
    if spec.zero_bubble and config.activation_checkpointing != "none":
        raise ValueError(
            f"{apart} would recompute activations twice: activation_checkpointing = {config.activation_checkpointing!r} needs another "
            "schedule"
        )
    if spec.zero_bubble and config.lora is not None:
        raise ValueError(f"{apart} leaves adapters out: lora needs another schedule")
    if spec.zero_bubble and fsdp.compile:
        raise ValueError(f"{apart} the backward of a compiled graph cannot: fsdp.compile = True needs another schedule")
    # torch defers reductions to the end of a call.
    if config.grad_sync == "micro_batch":
        raise ValueError(
            f"grad_sync = 'micro_batch' with backend = '{dims}': a pipeline reduces gradients once, at the end of a call; leave it out"
        )
    return spec


def check_pipeline_attention(dims: ParallelDims, *, packed: bool) -> None:
    """Check that sequences are packed, because the stages of a pipeline exchange packed tokens.

    Raises:
        ValueError: sequences are in rows and the layout has a pipeline.
    """
    if dims.pp > 1 and not packed:
        raise ValueError("fsdp.attention = 'rows' with p: pipelines need packed attention; leave one of the two out")
