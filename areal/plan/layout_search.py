"""Search for the layouts of a world that fit into memory, fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal.api import LoRAConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.parallel import ParallelDims
from areal.api.sections.fsdp import FSDPConfig
from areal.api.sections.megatron import MegatronConfig
from areal.engine.model.hub import experts_per_layer, read_config
from areal.plan.engines.planned_step import NotPlannedError
from areal.plan.hardware import Hardware
from areal.plan.layout_plan import LayoutPlan, plan_layout
from areal.plan.trace import Workload
from areal.plan.uniform_layers import UniformLayers

_LARGEST_PIPELINE = 8
_MICRO_BATCHES_PER_STAGE = 4
_LARGEST_SHARD_GROUP = 64
_SET_BY_THE_PLAN = {
    "path": "name the model by --model",
    "backend": "name the layout by --backend",
    "mb_spec": "set --micro-batch",
    "init_from_scratch": "leave it out: no weights are read",
}
"""Fields of an engine's configuration that no setting changes -> what to do instead."""


@dataclass(frozen=True)
class PlanJob:
    """What to plan.

    Attributes:
        model: model directory with a ``config.json``.
        tokens_per_rank: most tokens of a step, divided by the number of ranks.
        length: tokens of a sequence.
        memory: bytes of a rank's device.
        hardware: rates.
        settings: further fields of the engine's configuration.
        micro_batch: tokens of a micro-batch of a data-parallel rank; ``None`` chooses.
        servers: number of inference servers.
    """

    model: str
    tokens_per_rank: int
    length: int
    memory: int
    hardware: Hardware
    settings: Mapping[str, Any]
    micro_batch: int | None = None
    servers: int = 1

    def workload(self, dims: ParallelDims, n_mbs: int | None = None) -> Workload:
        """Return the batch of a data-parallel rank, whose context-, tensor- and pipeline-parallel ranks compute it together.

        Args:
            n_mbs: largest number of micro-batches. Defaults to one, or to four for each stage of a pipeline.

        Raises:
            ValueError: the batch is shorter than a sequence.
        """
        tokens = self.tokens_per_rank * dims.cp * dims.tp * dims.pp
        sequences = tokens // self.length
        if not sequences:
            raise ValueError(
                f"tokens_per_rank = {self.tokens_per_rank} with backend = '{dims}': a data-parallel rank has {tokens} tokens, less than one "
                f"sequence of {self.length}; raise tokens_per_rank, or choose a larger c"
            )
        if self.micro_batch is not None:
            return Workload(sequences, self.length, max(self.micro_batch, self.length))
        most = n_mbs or (1 if dims.pp == 1 else _MICRO_BATCHES_PER_STAGE * dims.pp)
        # The last micro-batch may be shorter.
        at_once = -(-sequences // min(most, sequences))
        return Workload(sequences, self.length, at_once * self.length)

    def config(self, dims: ParallelDims, workload: Workload, checkpointing: str | None = None) -> TrainEngineConfig:
        """Return the configuration of a layout.

        Raises:
            ValueError: the settings have what the plan itself sets.
        """
        for name, way_out in _SET_BY_THE_PLAN.items():
            if name in self.settings:
                raise NotPlannedError(name, self.settings[name], way_out)
        defaults: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-5, lr_scheduler="constant")}
        chosen = {} if checkpointing is None else {"activation_checkpointing": checkpointing}
        return TrainEngineConfig(
            path=self.model,
            backend=str(dims),
            init_from_scratch=True,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=workload.micro_batch),
            **defaults | dict(self.settings) | chosen,
        )

    def uniform_layers(self) -> UniformLayers | None:
        """Return the layers of the model; ``None`` if they, their adapters or their memory differ, so that every layer must be run."""
        optimizer = self.settings.get("optimizer")
        # A rank computes whole matrices, whose number does not grow with every layer.
        if optimizer is not None and OptimizerConfig.model_validate(optimizer).type == "muon":
            return None
        if self.settings.get("lora") is not None:
            targets = LoRAConfig.model_validate(self.settings["lora"]).target_modules
            # A pattern, or a name with a dot, may select layers by their numbers.
            if targets != "all-linear" and (isinstance(targets, str) or any("." in name for name in targets)):
                return None
        megatron = MegatronConfig.model_validate(self.settings.get("megatron") or {})
        if megatron.first_stage_layers is not None or megatron.last_stage_layers is not None:
            return None
        # Activations of some layers are on the device, or recomputed, and not of others.
        fsdp = FSDPConfig.model_validate(self.settings.get("fsdp") or {})
        if fsdp.activation_offload or fsdp.pipeline_layers is not None or fsdp.checkpointed_share != 1.0:
            return None
        return UniformLayers.of(self.model)

    def plan(self, dims: ParallelDims, layers: UniformLayers | None = None) -> LayoutPlan:
        """Plan a layout with the settings as they are.

        Raises:
            ValueError: see :func:`~areal.plan.layout_plan.plan_layout`.
        """
        workload = self.workload(dims)
        return plan_layout(self.config(dims, workload), workload, self.hardware, self.memory, layers)


def with_world_size(dims: ParallelDims, world_size: int) -> ParallelDims:
    """Return a layout with more data-parallel ranks, which shard parameters, so that it has ``world_size`` ranks.

    Raises:
        ValueError: the layout's ranks do not divide the world.
    """
    if world_size % dims.world_size:
        raise ValueError(
            f"world_size = {world_size} with backend = '{dims}': its {dims.world_size} ranks do not divide the world; choose other degrees"
        )
    return replace(dims, dp_shard=dims.dp_shard * world_size // dims.world_size)


def layouts(job: PlanJob, backend: str, world_size: int) -> Iterator[ParallelDims]:
    """Yield the layouts to compare.

    Tensor and context parallelism stay on a node. Context parallelism is for sequences that are longer than the tokens of a rank.
    """
    config, node = read_config(job.model).get_text_config(), job.hardware.ranks_per_node
    experts = experts_per_layer(config)
    degrees = [1 << n for n in range(7)]
    for p in (n for n in degrees if n <= min(_LARGEST_PIPELINE, config.num_hidden_layers)):
        for t in (n for n in degrees if n <= node and (n == 1 or not experts)):
            for c in (n for n in degrees if n * t <= node and (n == 1 or job.length > job.tokens_per_rank * t)):
                d, left = divmod(world_size, p * t * c)
                if left or not d:
                    continue
                # One group of shards over all ranks, or replicas of a smaller one.
                groups = {1, max(1, d * c // _LARGEST_SHARD_GROUP)} if p == 1 and backend == "fsdp" else {1}
                for r in sorted(r for r in groups if d % r == 0):
                    for e in (n for n in degrees if n == 1 or (experts and n <= experts and n >= node)):
                        if (d // r * c) % e == 0:
                            yield ParallelDims(backend=backend, dp_shard=d // r, dp_replicate=r, pp=p, tp=t, cp=c, ep=e)


def best_layouts(
    job: PlanJob, backend: str, world_size: int, layers: UniformLayers | None, progress: Callable[[str], None]
) -> list[LayoutPlan]:
    """Return the plans of layouts that the engine supports and that fit into memory, fastest first: those with most tokens per second.

    Their batches may differ, by the tokens that do not fill a sequence of a data-parallel rank.

    For each layout, activations are recomputed, or micro-batches are of one sequence, only if it does not fit otherwise. Pipelines are left out
    if a shorter one with the same other degrees fits without recomputation (or with what the settings say), and its step is shorter than the
    computation with the bubble of the longer one.

    Raises:
        ValueError: the engine refuses each of the layouts; the first refusal.
    """
    fixed = "activation_checkpointing" in job.settings
    found: list[LayoutPlan] = []
    refusals: list[ValueError] = []
    planned = 0
    shorter: dict[tuple[int, ...], LayoutPlan] = {}
    candidates = list(layouts(job, backend, world_size))
    for number, dims in enumerate(candidates):
        degrees = (dims.tp, dims.cp, dims.ep)
        known = shorter.get(degrees)
        # Not by the seconds of a step that recomputes activations, which a longer pipeline may not need.
        if (
            known is not None
            and (fixed or known.config.activation_checkpointing == "none")
            and known.seconds <= known.slowest.trace.seconds * (1 + _least_bubble(dims))
        ):
            continue
        progress(f"layout {number + 1} of {len(candidates)}: {dims}")
        try:
            plan = _fitting(job, dims, layers)
        except NotPlannedError:
            raise
        except ValueError as error:
            refusals.append(error)
            continue
        planned += 1
        if plan is not None:
            found.append(plan)
            shorter[degrees] = plan
    if refusals and not planned:
        raise refusals[0]
    return sorted(found, key=lambda plan: -plan.tokens_per_second)


def _least_bubble(dims: ParallelDims) -> float:
    """Return the bubble with as many micro-batches as the search takes, and -1 without a pipeline: all of those are tried."""
    return (dims.pp - 1) / (_MICRO_BATCHES_PER_STAGE * dims.pp) if dims.pp > 1 else -1.0


def _fitting(job: PlanJob, dims: ParallelDims, layers: UniformLayers | None) -> LayoutPlan | None:
    """Return the fastest plan of a layout that fits into memory; ``None`` if there is none.

    Raises:
        ValueError: the engine refuses the layout.
    """
    fixed = "activation_checkpointing" in job.settings
    for checkpointing in (None,) if fixed else ("none", "full"):
        smallest: int | None = None
        for n_mbs in (None, 1 << 20):
            workload = job.workload(dims, n_mbs)
            if workload.micro_batch == smallest:
                continue
            smallest = workload.micro_batch
            config = job.config(dims, workload, checkpointing)
            plan = plan_layout(config, workload, job.hardware, job.memory, layers)
            if plan.largest.nbytes <= job.memory:
                return plan
    return None
