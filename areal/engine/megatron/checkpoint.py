"""Saves and loads a Megatron-Core model, its optimizer and the state of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from areal.api.checkpoint import SaveLoadMeta
from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, RunInfo
from areal.engine.checkpoint.dcp import METADATA, prepare_files, read_metadata, read_tensors
from areal.engine.checkpoint.run_state import to_bytes
from areal.engine.megatron import gradients as grad
from areal.engine.megatron.dist_checkpoint import (
    FORMAT,
    MAINS,
    OPTIMIZER,
    ParameterState,
    Pieces,
    SavePlanner,
    common_state,
    model_pieces,
    optimizer_states,
    parts_of,
    set_step,
    state_boxes,
    store,
    to_load,
    to_save,
)
from areal.engine.megatron.weights import MegatronWeights
from areal.engine.optimizer import ClippingOptimizer
from areal.utils.distributed import ControlPlane

_EXTRA_STATE = "_extra_state"


class MegatronCheckpointer(EngineCheckpointer):
    """Checkpoints of one engine.

    ``"dcp"`` checkpoints are Megatron-Core's ``torch_dist`` ones, which ``megatron.core.dist_checkpointing.load`` reads too. Any layout
    loads them, and an engine whose optimizer is distributed, or whose dtype is another, loads those of one where it is not.

    Args:
        chunks: of this rank.
        chained: Megatron-Core's optimizer over them, and ``schedule`` around it, or None for both.
        weights: of the same chunks. groups: of the layout.
        vocab_size: rows of the vocabulary, without those that only fill it up.
        others: as :class:`~areal.engine.checkpoint.checkpointer.EngineCheckpointer`.
    """

    engine: ClassVar[str] = "megatron"

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        chained: ChainedOptimizer | None,
        schedule: ClippingOptimizer | None,
        weights: MegatronWeights,
        groups: ProcessGroupCollection,
        vocab_size: int,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        **options: Any,
    ) -> None:
        inners = (
            [part.optimizer for part in chained.chained_optimizers if part.optimizer is not None] if chained else []
        )
        kind = type(inners[0]).__name__ if inners else None
        super().__init__(schedule, kind, weights, run, control, source, **options)
        self._chunks = chunks
        self._chained = chained
        self._clipping = schedule
        self._groups = groups
        self._vocab_size = vocab_size
        self._keys: set[str] = set()

    def load(self, meta: SaveLoadMeta) -> None:
        if not self._keys:  # what the model has on any stage
            mine = {piece.key for pieces in self._pieces().values() for piece in pieces}
            self._keys = set().union(*self._control.gather(mine))
        super().load(meta)

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        grad.settle_parameters(self._chunks)
        files = dict(files)

        def collect_tensors() -> dict[str, Any]:
            pieces = self._pieces()
            optimizer = self._optimizer_tensors(pieces) if with_optim else ()
            if self._control.rank == 0:
                files.update(self._common_files(with_optim))
            return to_save(chain(chain.from_iterable(pieces.values()), optimizer))

        tensors = self._control.attempt(collect_tensors)
        planner = SavePlanner(flatten_state_dict=False)
        about = about | {"vocab_size": self._vocab_size}
        return prepare_files(tensors, files, planner, self._control, draft, asynchronous=asynchronous, about=about)

    def _common_files(self, with_optim: bool) -> dict[str, bytes]:
        """What ``megatron.core.dist_checkpointing`` looks for beside the tensors."""
        common: dict[str, Any] = {"content_metadata": dict(FORMAT)}
        if with_optim and self._chained is not None:
            common["optimizer"] = common_state(self._chained)
        config = CheckpointingConfig("torch_dist", 1)
        return {COMMON_STATE_FNAME: to_bytes(common), CONFIG_FNAME: json.dumps(asdict(config)).encode()}

    def _pieces(self) -> Pieces:
        return model_pieces(self._chunks, self._groups)

    def _optimizer_tensors(self, pieces: Pieces) -> Iterator[ShardedTensor]:
        for part in parts_of(self._chained) if self._chained is not None else ():
            for held in optimizer_states(part):
                for name in held.states:
                    yield from state_boxes(held, pieces[held.parameter], name, f"{OPTIMIZER}{name}.{{}}")

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        metadata = read_metadata(path)
        pieces = self._pieces()
        saved = _Saved(path, metadata, about["vocab_size"])
        saved.check_model(pieces, self._keys, self._vocab_size)
        if with_optim and self._chained is not None:
            for part in parts_of(self._chained):
                for held in optimizer_states(part):
                    saved.check_optimizer(held, pieces[held.parameter])

        def read() -> None:
            grad.settle_parameters(self._chunks)
            wanted = [saved.source_of(piece) for each in pieces.values() for piece in each]
            read_tensors(path, metadata, *to_load(wanted))
            if self._chained is None:
                return
            if with_optim:
                self._read_optimizer(saved, pieces)
            else:
                self._chained.reload_model_params()

        return read

    @torch.no_grad()
    def _read_optimizer(self, saved: _Saved, pieces: Pieces) -> None:
        if self._chained is None or self._clipping is None:
            return
        parts = parts_of(self._chained)
        # Copies of a precision-aware optimizer's states are filled before they are put back.
        found = [(part, held) for part in parts for held in optimizer_states(part)]
        wanted = [
            tensor
            for _, held in found
            for name in held.states
            if not (name == held.main and held.main_is_view)  # read with the model, whole
            for tensor in saved.state_of(held, pieces[held.parameter], name)
        ]
        read_tensors(saved.path, saved.metadata, *to_load(wanted))
        for part, held in found:
            store(part, held)
        set_step(parts, self._clipping.steps)


class _Saved:
    """What a checkpoint holds, compared with what a model needs.

    Args:
        vocab_size: of the model that was saved.
    """

    def __init__(self, path: Path, metadata: Metadata, vocab_size: int) -> None:
        self.path, self.metadata = path, metadata
        self._vocab_size = vocab_size
        self._tensors = {
            key: found
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata) and _EXTRA_STATE not in key
        }

    def check_model(self, pieces: Pieces, keys: set[str], vocab_size: int) -> None:
        """Args: keys: of the whole model.

        Raises:
            ValueError: it is of another model; names file and key.
        """
        for piece in chain.from_iterable(pieces.values()):
            self._check(piece, piece.key)
            if piece.allow_shape_mismatch and vocab_size != self._vocab_size:
                raise ValueError(
                    f"{self.path / METADATA}: {piece.key!r} is of a vocabulary of {self._vocab_size}, but the model's has {vocab_size}"
                )
        extra = sorted(key for key in self._tensors if not key.startswith(OPTIMIZER) and key not in keys)
        if extra:
            raise ValueError(
                f"{self.path / METADATA} has {extra[0]!r}, which the model has not: it is of another model"
            )

    def check_optimizer(self, held: ParameterState, pieces: Sequence[ShardedTensor]) -> None:
        """Raises ValueError where a state of a parameter is missing; names file and key."""
        for name in held.states:
            for piece in pieces:
                if name != held.main:
                    self._check(piece, f"{OPTIMIZER}{name}.{piece.key}")

    def _check(self, piece: ShardedTensor, key: str) -> None:
        found = self._tensors.get(key)
        if found is None:
            raise ValueError(f"{self.path / METADATA} has no {key!r}, which the model needs: it is of another model")
        rows = 1 if piece.allow_shape_mismatch else 0  # their number depends on how ranks share out a vocabulary
        if len(found.size) != len(piece.global_shape) or tuple(found.size[rows:]) != piece.global_shape[rows:]:
            raise ValueError(
                f"{self.path / METADATA}: {key!r} has shape {list(found.size)}, but the model needs {list(piece.global_shape)}"
            )

    def source_of(self, piece: ShardedTensor) -> ShardedTensor:
        """From where a tensor of the model is read: from the main parameters where they are finer, and the model is."""
        stored = self._tensors[piece.key].properties.dtype
        if piece.dtype.itemsize <= stored.itemsize:
            return piece
        mains = [key for key in self._mains(piece) if key in self._tensors]
        return replace(piece, key=mains[0]) if mains else piece

    def state_of(self, held: ParameterState, pieces: Sequence[ShardedTensor], name: str) -> Iterator[ShardedTensor]:
        """From where a state is read. Where no main parameters were kept, they are what the model's parameters were."""
        for piece in pieces:
            keys = [f"{OPTIMIZER}{name}.{piece.key}"]
            if name == held.main:
                keys = [key for key in self._mains(piece) if key in self._tensors] or [piece.key]
            yield from state_boxes(held, [piece], name, keys[0])

    def _mains(self, piece: ShardedTensor) -> list[str]:
        return [f"{OPTIMIZER}{name}.{piece.key}" for name in MAINS]
