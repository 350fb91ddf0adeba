"""Trace of a training step of one rank of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, cast

import torch

from areal.api import TrainEngineConfig
from areal.plan.engines.planned_step import PlannedStep, planned_engine
from areal.plan.hardware import Hardware
from areal.plan.step_recorder import Collective, CollectiveCalls, StepRecorder
from areal.utils import platform

ENGINES = {
    "fsdp": "areal.plan.engines.fsdp:PlannedEngine",
    "megatron": "areal.plan.engines.megatron:PlannedMegatronEngine",
}
"""Names of engines that run on the meta device -> their classes."""


@dataclass(frozen=True)
class Workload:
    """The batch of a data-parallel rank.

    Attributes:
        sequences: number of sequences.
        length: tokens of each.
        micro_batch: tokens of a micro-batch.
    """

    sequences: int
    length: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.sequences * self.length

    @property
    def sequences_at_once(self) -> int:
        """Sequences of a micro-batch."""
        return min(self.sequences, self.micro_batch // self.length)

    def batch(self) -> list[dict[str, torch.Tensor]]:
        """Return sequences without meaning."""
        return [{"input_ids": torch.zeros(self.length, dtype=torch.int64)} for _ in range(self.sequences)]


@dataclass(frozen=True)
class Trace:
    """A step of one rank.

    Attributes:
        memory: peak bytes by kind.
        collectives: calls and bytes by kind of collective.
        flops: floating point operations of the rank.
        seconds: time of its operations, without collectives.
        n_mbs: number of micro-batches.
    """

    memory: Mapping[str, float]
    collectives: Mapping[Collective, CollectiveCalls]
    flops: float
    seconds: float
    n_mbs: int

    def plus(self, other: Trace, factor: float) -> Trace:
        """Return this trace plus ``factor`` times the difference to ``other``: a trace of more layers than both."""

        def extend(mine: float, others: float) -> float:
            return mine + factor * (others - mine)

        memory = {kind: max(0.0, extend(nbytes, other.memory.get(kind, 0))) for kind, nbytes in self.memory.items()}
        collectives = {}
        for kind in {**self.collectives, **other.collectives}:
            a, b = self.collectives.get(kind, CollectiveCalls()), other.collectives.get(kind, CollectiveCalls())
            collectives[kind] = CollectiveCalls(extend(a.count, b.count), extend(a.nbytes, b.nbytes))
        return Trace(
            memory, collectives, extend(self.flops, other.flops), extend(self.seconds, other.seconds), self.n_mbs
        )


def trace_step(config: TrainEngineConfig, workload: Workload, rank: int, hardware: Hardware, memory: int) -> Trace:
    """Run a step of an engine on the meta device, as rank ``rank`` of its layout, and record it.

    Of a real engine it is the second step: the first one gathers each layer once more.

    Args:
        memory: bytes of a rank's device.

    Raises:
        ValueError: the engine refuses the layout, or the plan an option.
    """
    with planned_engine(_make_engine, config, memory, rank) as engine:
        mbs = engine.microbatches(workload.batch())
        with StepRecorder(simulate=True, experts_per_token=engine.experts_per_token):
            engine.warm_up(mbs)
        recorder = StepRecorder(
            simulate=True,
            seconds=hardware.operation_seconds,
            vocab_rows=engine.head_rows,
            experts_per_token=engine.experts_per_token,
        )
        engine.watch(recorder)
        with recorder:
            engine.run_step(mbs)
        held, updated = engine.held_bytes(), engine.update_bytes()
    update = hardware.operation_seconds(0.0, updated) if updated else 0.0
    peak: Counter[str] = Counter(held)
    peak.update({kind: nbytes for kind, nbytes in recorder.peak.items() if kind})
    for kind in ("activations", "logits", "communication"):
        peak.setdefault(kind, 0)
    return Trace(dict(peak), recorder.collectives, recorder.flops, recorder.seconds + update, len(mbs))


def check_engine(backend: str) -> None:
    """Check that an engine runs on the meta device.

    Args:
        backend: name of an engine, with or without a layout.

    Raises:
        ValueError: there are no plans of the engine, or not in this process.
    """
    engine = backend.partition(":")[0]
    if engine not in ENGINES:
        raise ValueError(
            f"backend = {backend!r}: there are plans of the engines {', '.join(ENGINES)} and jax; choose one of them, with a layout"
        )
    # Megatron-Core's CUDA calls are answered only where there is no GPU.
    if engine == "megatron" and platform.accelerator() != "cpu":
        raise ValueError(
            f"backend = {backend!r}: a plan of the Megatron engine needs a process without a GPU; set CUDA_VISIBLE_DEVICES=''"
        )


def _make_engine(config: TrainEngineConfig, memory: int) -> PlannedStep:
    """Return an engine on the meta device.

    Raises:
        ValueError: there are no plans of the engine, its packages are not installed, or the plan refuses an option.
    """
    check_engine(config.backend)
    engine = config.dims.backend
    module, _, name = ENGINES[engine].partition(":")
    try:
        return cast(PlannedStep, getattr(import_module(module), name)(config, memory))
    except ImportError as error:
        raise ValueError(f"backend = {config.backend!r} ({error}): pip install 'areal[{engine}]'") from error


class TraceRequest(NamedTuple):
    """Arguments of :func:`trace_step`."""

    config: TrainEngineConfig
    workload: Workload
    rank: int
    hardware: Hardware
    memory: int
