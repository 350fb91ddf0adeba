"""Save and load a Megatron-Core model, its optimizer and the state of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.metadata import Metadata

from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, RunInfo
from areal.engine.checkpoint.dcp import BoxSavePlanner, TensorBoxes, TensorPlace, prepare_files, read_metadata
from areal.engine.checkpoint.run_state import to_bytes
from areal.engine.checkpoint.run_tensors import EXCHANGING, MODEL, OPTIM, check_weights, read_slices, weight_key
from areal.engine.megatron.dist_checkpoint import (
    FORMAT,
    MAINS,
    common_state,
    model_tensors,
    optimizer_states,
    set_step,
    sub_optimizers,
    tensors_to_save,
    write_back,
)
from areal.engine.megatron.optimizer.main_parameters import present_optimizers
from areal.engine.megatron.optimizer.muon import is_matrix
from areal.engine.megatron.optimizer.step import MegatronOptimizerStep
from areal.engine.megatron.weights import MegatronWeights
from areal.engine.optimizer import ClippingOptimizer
from areal.utils.distributed import ControlPlane

_TORCH_NAMES = {"FusedAdam": "AdamW", "FusedSGD": "SGD"}
"""Optimizers of Transformer Engine and Apex, which Megatron-Core takes where it finds them, and torch's with the same state."""


class MegatronCheckpointer(EngineCheckpointer):
    """Checkpoints of one Megatron engine.

    ``"dcp"`` checkpoints have the tensors of :mod:`areal.engine.checkpoint.run_tensors`, which any layout of any engine
    loads. The same values also have the names of Megatron-Core's ``torch_dist`` format, which
    ``megatron.core.dist_checkpointing.load`` can read. Engines with and without a distributed optimizer, and of
    different dtypes, can load each other's.

    Args:
        chunks: model chunks of this rank.
        chained: Megatron-Core's optimizer over the chunks, or ``None``.
        schedule: clipping and learning-rate schedule around ``chained``, or ``None``.
        weights: weights of the same chunks.
        groups: process groups of the layout.
        run, control, source, options: as in :class:`~areal.engine.checkpoint.checkpointer.EngineCheckpointer`.
    """

    engine: ClassVar[str] = "megatron"
    reads: ClassVar[frozenset[str]] = EXCHANGING

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        chained: ChainedOptimizer | None,
        schedule: ClippingOptimizer[MegatronOptimizerStep] | None,
        weights: MegatronWeights,
        groups: ProcessGroupCollection,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        **options: Any,
    ) -> None:
        # The kind of optimizer is recorded in the checkpoint.
        inners = [each.optimizer for each in present_optimizers(chained)]
        kind = type(inners[0]).__name__ if inners else ""
        has_muon = schedule is not None and schedule.inner.matrices is not None
        kind = "Muon" if has_muon else _TORCH_NAMES.get(kind, kind)
        super().__init__(schedule, kind or None, weights, run, control, source, **options)
        self._chunks = chunks
        self._chained = chained
        self._clipping = schedule
        self._weights = weights
        self._groups = groups

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        # Gathers of parameters may be pending, and main parameters offloaded.
        self._weights.complete()
        files = dict(files)

        def collect_tensors() -> dict[str, TensorBoxes]:
            # Also without the moments: the main parameters of the optimizers are the weights.
            optimizers = (sub_optimizers if with_optim else present_optimizers)(self._chained)
            if self._control.rank == 0:
                files.update(self._common_files(with_optim))
            model, weights = model_tensors(self._chunks, self._groups), self._weights
            tensors = tensors_to_save(weights.local_params, weights.shapes, model, optimizers, moments=with_optim)
            if with_optim and optimizers and self._optimizer_kind in ("AdamW", "Muon"):
                tensors |= self._step()
            return tensors

        # An error of any rank must be raised on all before the collective planning of the files.
        tensors = self._control.attempt(collect_tensors)
        return prepare_files(
            tensors, files, BoxSavePlanner(), self._control, draft, asynchronous=asynchronous, about=about
        )

    def _step(self) -> dict[str, TensorBoxes]:
        """Return the number of steps, which other engines read for each weight that AdamW updates."""
        step = torch.tensor(float(self._clipping.steps if self._clipping else 0))
        shapes, has_muon = self._weights.shapes, self._optimizer_kind == "Muon"
        counted = [name for name in self._weights.trained if not (has_muon and is_matrix(name, shapes[name]))]
        names = (f"{OPTIM}{weight_key(name)}.step" for name in sorted(counted))
        return {f"{OPTIM}step": TensorBoxes([((), step)], (), [[TensorPlace(name, (), ()) for name in names]])}

    def _common_files(self, with_optim: bool) -> dict[str, bytes]:
        """Return the files, in addition to the tensors, that ``megatron.core.dist_checkpointing`` expects."""
        common: dict[str, Any] = {"content_metadata": dict(FORMAT)}
        if with_optim and self._chained is not None:
            common["optimizer"] = common_state(self._chained)
        config = CheckpointingConfig("torch_dist", 1)
        return {COMMON_STATE_FNAME: to_bytes(common), CONFIG_FNAME: json.dumps(asdict(config)).encode()}

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        # Compare the full model, before anything changes.
        metadata = read_metadata(path)
        check_weights(path, metadata, {weight_key(name): shape for name, shape in self._weights.shapes.items()})

        def read() -> None:
            self._weights.fill(lambda slices: read_slices(path, metadata, f"{MODEL}{{}}", slices))
            if with_optim and self._chained is not None:
                self._read_moments(path, metadata, self._chained)

        return read

    @torch.no_grad()
    def _read_moments(self, path: Path, metadata: Metadata, chained: ChainedOptimizer) -> None:
        """Read the moments. Those that the checkpoint does not have are zero."""
        local_params = {local_param.parameter: local_param for local_param in self._weights.local_params}
        optimizers = sub_optimizers(chained)
        for optimizer in optimizers:
            for state in optimizer_states(optimizer):
                # Main parameters were read as weights.
                for name in state.states.keys() - set(MAINS):
                    moment = state.states[name]
                    buffer = torch.zeros(moment.numel(), dtype=torch.promote_types(moment.dtype, torch.float32))
                    slices = local_params[state.parameter].slices(buffer, state.start)
                    read_slices(path, metadata, f"{OPTIM}{{}}.{name}", slices)
                    moment.copy_(buffer.view(moment.shape))
                write_back(optimizer, state)
        set_step(optimizers, self._clipping.steps if self._clipping else 0)
