"""Plan of one layout: the peak memory of a rank, the collectives of a step, the bubble of the pipeline and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal.api import TrainEngineConfig
from areal.engine.fsdp.pipeline.schedule_specs import choose_schedule
from areal.engine.model.hub import read_config
from areal.plan.hardware import Hardware
from areal.plan.step_recorder import SHARDED, Collective, CollectiveCalls
from areal.plan.trace import Trace, TraceRequest, Workload, trace_step
from areal.plan.uniform_layers import UniformLayers, layers_by_rank

ZERO_BUBBLE_FRACTION = 1 / 3
"""Part of a schedule's bubble that remains if gradients of weights fill it (Qi et al., 2023, with equal times of the three passes)."""


@dataclass(frozen=True)
class Stage:
    """A rank of a pipeline stage.

    Attributes:
        rank: rank in the world.
        trace: its step.
        exposed: seconds of collectives that the computation waits for.
        overlapped: seconds of collectives of parameters and gradients, which run during the computation.
    """

    rank: int
    trace: Trace
    exposed: float
    overlapped: float

    @classmethod
    def of(cls, rank: int, trace: Trace, hardware: Hardware, *, waits: frozenset[str] = frozenset()) -> Stage:
        """Return a stage with the times of its collectives.

        Args:
            waits: names of collectives of parameters and gradients that do not overlap with the computation; see :func:`waiting`.
        """
        seconds = collective_seconds(trace.collectives, hardware)
        exposed = sum(value for kind, value in seconds.items() if kind.axis not in SHARDED or kind.name in waits)
        return cls(rank, trace, exposed, sum(seconds.values()) - exposed)

    @property
    def seconds(self) -> float:
        """Time of a step without the bubble: collectives of parameters and gradients are assumed to overlap perfectly."""
        return max(self.trace.seconds + self.exposed, self.overlapped)

    @property
    def nbytes(self) -> float:
        """Peak memory in bytes."""
        return sum(self.trace.memory.values())


@dataclass(frozen=True)
class LayoutPlan:
    """A step of a layout.

    Attributes:
        config: configuration of the engine.
        workload: batch of a data-parallel rank.
        stages: one rank of each traced pipeline stage, see :func:`traced_stages`; without a pipeline a single rank.
        bubble: idle time of a rank in the pipeline, as a fraction of its busy time.
    """

    config: TrainEngineConfig
    workload: Workload
    stages: tuple[Stage, ...]
    bubble: float

    @property
    def largest(self) -> Stage:
        """The stage with the largest peak memory."""
        return max(self.stages, key=lambda stage: stage.nbytes)

    @property
    def slowest(self) -> Stage:
        """The stage with the longest step."""
        return max(self.stages, key=lambda stage: stage.seconds)

    @property
    def seconds(self) -> float:
        """Time of a step: that of the slowest stage, and the bubble."""
        return self.slowest.seconds * (1 + self.bubble)

    @property
    def tokens(self) -> int:
        """Tokens of a step of all ranks."""
        return self.workload.tokens * self.config.dims.dp

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank."""
        return self.tokens / self.config.dims.world_size / self.seconds


def waiting(config: TrainEngineConfig) -> frozenset[str]:
    """Return the names of collectives of parameters and gradients that the computation waits for."""
    # The gradients of adapters are summed after the last backward, in one all-reduce of each group of ranks.
    names = set() if config.lora is None else {"all_reduce"}
    if config.dims.backend == "megatron":
        names |= set() if config.megatron.overlap_grad_reduce else {"all_reduce", "reduce_scatter"}
        names |= set() if config.megatron.overlap_param_gather else {"all_gather"}
    return frozenset(names)


def collective_seconds(
    collectives: Mapping[Collective, CollectiveCalls], hardware: Hardware
) -> dict[Collective, float]:
    """Return the seconds of all calls of each collective."""
    return {
        kind: calls.count
        * hardware.collective_seconds(kind.name, calls.nbytes / max(calls.count, 1), kind.size, kind.stride)
        for kind, calls in collectives.items()
    }


def plan_layout(
    config: TrainEngineConfig,
    workload: Workload,
    hardware: Hardware,
    memory: int,
    layers: UniformLayers | None = None,
) -> LayoutPlan:
    """Plan a layout by running its engine on the meta device.

    Args:
        config: configuration with micro-batches of ``workload.micro_batch`` tokens.
        memory: bytes of a rank's device.
        layers: extrapolate from models with one and with two layers per stage, instead of running all layers.

    Raises:
        ValueError: the engine refuses the layout, or the plan refuses an option.
    """
    dims = config.dims
    ranks_per_stage = dims.world_size // dims.pp
    stages = []
    # Stages in the middle may have more layers than the ends, which the extrapolation takes into account.
    for stage in traced_stages(config) if layers is None else sorted({0, dims.pp - 1}):
        rank = stage * ranks_per_stage
        request = TraceRequest(config, workload, rank, hardware, memory)
        found = trace_step(*request) if layers is None else layers.extrapolate(request)
        stages.append(Stage.of(rank, found, hardware, waits=waiting(config)))
    return LayoutPlan(config, workload, tuple(stages), pipeline_bubble(config, stages[0].trace.n_mbs))


def traced_stages(config: TrainEngineConfig) -> list[int]:
    """Return the pipeline ranks to trace: the first, the last, the one in the middle, whose kinds of layers may differ, and the largest.

    An earlier rank keeps the activations of more micro-batches. So a rank between the first and the last may be the largest if it has more
    layers than those in front of it.
    """
    dims, last = config.dims, config.dims.pp - 1
    if dims.backend == "megatron":
        # All stages between the first and the last have equally many layers.
        largest = {min(1, last)}
    else:
        layers = layers_by_rank(config, read_config(config.path).get_text_config().num_hidden_layers)
        largest = {rank for rank in range(1, last) if layers[rank] > max(layers[1:rank], default=0)}
    return sorted({0, dims.pp // 2, last} | largest)


def pipeline_bubble(config: TrainEngineConfig, n_mbs: int) -> float:
    """Return the idle time of a rank in the pipeline as a fraction of its busy time.

    ``(p - 1) / (v n)`` for ``p`` ranks with ``v`` chunks each and ``n`` micro-batches (Narayanan et al., 2021).
    """
    dims, schedule = config.dims, choose_schedule(config)
    bubble = (dims.pp - 1) / (dims.vpp * n_mbs)
    return bubble * ZERO_BUBBLE_FRACTION if schedule.zero_bubble else bubble
