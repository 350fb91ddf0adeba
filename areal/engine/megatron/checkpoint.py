"""Save and load a Megatron-Core model, its optimizer and the state of the run."""

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
from areal.engine.checkpoint.run_tensors import MODEL, OPTIM, check_weights, read_slices, weight_key
from areal.engine.megatron import gradients as grad
from areal.engine.megatron.dist_checkpoint import (
    FORMAT,
    MAINS,
    OPTIMIZER,
    ModelTensors,
    ParameterState,
    SavePlanner,
    common_state,
    model_tensors,
    optimizer_states,
    set_step,
    state_tensors,
    sub_optimizers,
    tensors_to_load,
    tensors_to_save,
    write_back,
)
from areal.engine.megatron.weights import MegatronWeights
from areal.engine.optimizer import ClippingOptimizer
from areal.utils.distributed import ControlPlane

_EXTRA_STATE = "_extra_state"


class MegatronCheckpointer(EngineCheckpointer):
    """Checkpoints of one Megatron engine.

    ``"dcp"`` checkpoints have Megatron-Core's ``torch_dist`` format, which
    ``megatron.core.dist_checkpointing.load`` can read. Any layout can load them. Engines with and without a
    distributed optimizer, and of different dtypes, can load each other's. Those of other engines are read in their form, see
    :mod:`areal.engine.checkpoint.run_tensors`.

    Args:
        chunks: model chunks of this rank.
        chained: Megatron-Core's optimizer over the chunks, or ``None``.
        schedule: clipping and learning-rate schedule around ``chained``, or ``None``.
        weights: weights of the same chunks.
        groups: process groups of the layout.
        vocab_size: rows of the vocabulary, without padding.
        run, control, source, options: as in :class:`~areal.engine.checkpoint.checkpointer.EngineCheckpointer`.
    """

    engine: ClassVar[str] = "megatron"
    reads: ClassVar[frozenset[str]] = frozenset({"megatron", "fsdp", "jax"})
    # With Transformer Engine or Apex, Megatron-Core takes their optimizers. They keep the same moments.
    same_state: ClassVar[Mapping[str, str]] = {"FusedAdam": "AdamW", "FusedSGD": "SGD"}

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
        # A rank without parameters of an optimizer has an empty entry. The kind of optimizer is recorded in the
        # checkpoint.
        inners = (
            [each.optimizer for each in chained.chained_optimizers if each.optimizer is not None] if chained else []
        )
        kind = type(inners[0]).__name__ if inners else None
        super().__init__(schedule, kind, weights, run, control, source, **options)
        self._chunks = chunks
        self._chained = chained
        self._clipping = schedule
        self._weights = weights
        self._groups = groups
        self._vocab_size = vocab_size
        self._keys: set[str] = set()

    def load(self, meta: SaveLoadMeta) -> None:
        if not self._keys:  # keys of the full model, over all stages; they never change
            own_keys = {tensor.key for tensors in self._model_tensors().values() for tensor in tensors}
            self._keys = set().union(*self._control.gather(own_keys))
        super().load(meta)

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        # With overlapped gathers, parameters may still be incomplete.
        grad.finish_param_gather(self._chunks)
        files = dict(files)

        def collect_tensors() -> dict[str, Any]:
            model = self._model_tensors()
            optimizer = self._optimizer_tensors(model) if with_optim else ()
            if self._control.rank == 0:
                files.update(self._common_files(with_optim))
            return tensors_to_save(chain(chain.from_iterable(model.values()), optimizer))

        # An error of any rank must be raised on all before the collective planning of the files.
        tensors = self._control.attempt(collect_tensors)
        # The vocabulary size tells padding rows from real ones when loading.
        planner = SavePlanner(flatten_state_dict=False)
        about = about | {"vocab_size": self._vocab_size}
        return prepare_files(tensors, files, planner, self._control, draft, asynchronous=asynchronous, about=about)

    def _common_files(self, with_optim: bool) -> dict[str, bytes]:
        """Return the files, in addition to the tensors, that ``megatron.core.dist_checkpointing`` expects."""
        common: dict[str, Any] = {"content_metadata": dict(FORMAT)}
        if with_optim and self._chained is not None:
            common["optimizer"] = common_state(self._chained)
        config = CheckpointingConfig("torch_dist", 1)
        return {COMMON_STATE_FNAME: to_bytes(common), CONFIG_FNAME: json.dumps(asdict(config)).encode()}

    def _model_tensors(self) -> ModelTensors:
        return model_tensors(self._chunks, self._groups)

    def _optimizer_tensors(self, tensors: ModelTensors) -> Iterator[ShardedTensor]:
        for optimizer in sub_optimizers(self._chained) if self._chained is not None else ():
            for state in optimizer_states(optimizer):
                for name in state.states:
                    yield from state_tensors(state, tensors[state.parameter], name, f"{OPTIMIZER}{name}.{{}}")

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        # Compare everything that will be read, before anything changes.
        metadata = read_metadata(path)
        if about.get("engine", "fsdp") != self.engine:
            return self._check_run_tensors(path, metadata, with_optim=with_optim)
        tensors = self._model_tensors()
        saved = _Saved(path, metadata, about["vocab_size"])
        saved.check_model(tensors, self._keys, self._vocab_size)
        if with_optim and self._chained is not None:
            for optimizer in sub_optimizers(self._chained):
                for state in optimizer_states(optimizer):
                    saved.check_optimizer(state, tensors[state.parameter])

        def read() -> None:
            grad.finish_param_gather(self._chunks)
            # Read the model; then the optimizer, or its main parameters from the model.
            wanted = [saved.source_of(tensor) for each in tensors.values() for tensor in each]
            read_tensors(path, metadata, *tensors_to_load(wanted))
            if self._chained is None:
                return
            if with_optim:
                self._read_optimizer(saved, tensors)
            else:
                self._weights.update_mains()

        return read

    def _check_run_tensors(self, path: Path, metadata: Metadata, *, with_optim: bool) -> Callable[[], None]:
        """Compare a checkpoint of another engine with the model. Returns the function that reads it."""
        check_weights(path, metadata, {weight_key(name): shape for name, shape in self._weights.shapes.items()})

        def read() -> None:
            self._weights.fill(lambda slices: read_slices(path, metadata, f"{MODEL}{{}}", slices))
            if with_optim and self._chained is not None:
                self._read_run_moments(path, metadata, self._chained)

        return read

    @torch.no_grad()
    def _read_run_moments(self, path: Path, metadata: Metadata, chained: ChainedOptimizer) -> None:
        """Read moments of another engine. Those that the checkpoint does not have are zero."""
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

    @torch.no_grad()
    def _read_optimizer(self, saved: _Saved, tensors: ModelTensors) -> None:
        if self._chained is None or self._clipping is None:
            return
        optimizers = sub_optimizers(self._chained)
        # A precision-aware optimizer returns copies of its states: fill these, and write them back below.
        states = [(optimizer, state) for optimizer in optimizers for state in optimizer_states(optimizer)]
        wanted = [
            tensor
            for _, state in states
            for name in state.states
            if not (name == state.main and state.main_is_view)  # already read with the model
            for tensor in saved.state_of(state, tensors[state.parameter], name)
        ]
        read_tensors(saved.path, saved.metadata, *tensors_to_load(wanted))
        for optimizer, state in states:
            write_back(optimizer, state)
        set_step(optimizers, self._clipping.steps)


class _Saved:
    """Content of a checkpoint, compared with the needs of a model.

    Args:
        path: directory of the checkpoint.
        metadata: metadata of the checkpoint.
        vocab_size: vocabulary size of the saved model.
    """

    def __init__(self, path: Path, metadata: Metadata, vocab_size: int) -> None:
        self.path, self.metadata = path, metadata
        self._vocab_size = vocab_size
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and _EXTRA_STATE not in key
        }

    def check_model(self, tensors: ModelTensors, keys: set[str], vocab_size: int) -> None:
        """Compare the tensors of the model.

        Args:
            tensors: tensors of this rank's chunks.
            keys: keys of the full model.
            vocab_size: vocabulary size of the model.

        Raises:
            ValueError: the checkpoint is of another model; names file and key.
        """
        for tensor in chain.from_iterable(tensors.values()):
            self._check(tensor, tensor.key)
            # Padded tensors may differ in shape between layouts, but not in their real rows.
            if tensor.allow_shape_mismatch and vocab_size != self._vocab_size:
                raise ValueError(
                    f"{self.path / METADATA}: {tensor.key!r} is of a vocabulary of {self._vocab_size}, but the model's has {vocab_size}"
                )
        # Tensors that no stage needs belong to another model.
        extra = sorted(key for key in self._tensors if not key.startswith(OPTIMIZER) and key not in keys)
        if extra:
            raise ValueError(
                f"{self.path / METADATA} has {extra[0]!r}, which the model has not: it is of another model"
            )

    def check_optimizer(self, state: ParameterState, tensors: Sequence[ShardedTensor]) -> None:
        """Check that all optimizer states of a parameter are present, except the main parameter.

        Raises:
            ValueError: a state is missing; names file and key.
        """
        for name in state.states:
            for tensor in tensors:
                if name != state.main:
                    self._check(tensor, f"{OPTIMIZER}{name}.{tensor.key}")

    def _check(self, tensor: ShardedTensor, key: str) -> None:
        entry = self._tensors.get(key)
        if entry is None:
            raise ValueError(f"{self.path / METADATA} has no {key!r}, which the model needs: it is of another model")
        rows = 1 if tensor.allow_shape_mismatch else 0  # padding depends on the tensor-parallel size
        if len(entry.size) != len(tensor.global_shape) or tuple(entry.size[rows:]) != tensor.global_shape[rows:]:
            raise ValueError(
                f"{self.path / METADATA}: {key!r} has shape {list(entry.size)}, but the model needs {list(tensor.global_shape)}"
            )

    def source_of(self, tensor: ShardedTensor) -> ShardedTensor:
        """Return the tensor to read for a tensor of the model.

        This is the main parameter if it is saved, and the model has a wider dtype than the saved model.
        """
        stored = self._tensors[tensor.key].properties.dtype
        if tensor.dtype.itemsize <= stored.itemsize:
            return tensor
        mains = [key for key in self._mains(tensor) if key in self._tensors]
        return replace(tensor, key=mains[0]) if mains else tensor

    def state_of(self, state: ParameterState, tensors: Sequence[ShardedTensor], name: str) -> Iterator[ShardedTensor]:
        """Yield the tensors to read for an optimizer state.

        Without saved main parameters, they are read from the model's parameters.
        """
        for tensor in tensors:
            keys = [f"{OPTIMIZER}{name}.{tensor.key}"]
            if name == state.main:
                keys = [key for key in self._mains(tensor) if key in self._tensors] or [tensor.key]
            yield from state_tensors(state, [tensor], name, keys[0])

    def _mains(self, tensor: ShardedTensor) -> list[str]:
        return [f"{OPTIMIZER}{name}.{tensor.key}" for name in MAINS]
