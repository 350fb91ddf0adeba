"""The public surface of every train engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.adapters import Adapters
from areal.api.batch import Batch, OptimStats, OutputName, StepOutput
from areal.api.checkpoint import SaveLoadMeta
from areal.api.config import FinetuneSpec, TrainEngineConfig
from areal.api.loss import LossFn, LossWeightFn, Normalization, ProcessOutputFn
from areal.api.microbatch import MicroBatchList
from areal.api.parallel import ParallelDims
from areal.api.weights import NamedTensor

BatchInput = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A dict of tensors, right-padded ``[B, S]`` with ``attention_mask``, or a list of per-sample dicts of ``[S_i]``."""

Outputs = tuple[OutputName, ...]


def default_loss_weight(batch: Batch) -> Tensor:
    """The sum of ``loss_mask``, or the number of positions with a target where there is none.

    Where ``target_ids`` is ``[T, K]``, a position has a target when any of its ``K`` is one.
    """
    if "loss_mask" in batch:
        return batch["loss_mask"].sum()
    targets = batch["target_ids"] >= 0
    return (targets if targets.dim() == 1 else targets.any(-1)).sum()


class TrainEngine(ABC):
    """A model with its optimizer on some layout of ranks.

    Every data-parallel rank passes its own samples; ranks that share a data-parallel coordinate pass the same batch. Every verb is
    collective: all ranks of the layout call it. What one rank's batch or loss gets wrong raises on all of them, naming the
    rank, and the engine can be used for the next call unless the error says that it cannot.
    """

    config: TrainEngineConfig
    dims: ParallelDims
    device: torch.device
    version: int

    # ---- life

    @abstractmethod
    def initialize(self, spec: FinetuneSpec) -> None:
        """Join or start the process group, build and load the model, make the optimizer.

        Starts the default process group where there is none: from the variables that torchrun sets, or a world of one.

        Raises:
            ValueError: the layout does not fit the world or the engine, or the model cannot be run; on every rank.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Finish an asynchronous save, free model, optimizer and this engine's process groups. May be called twice."""

    def __enter__(self) -> TrainEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    @property
    @abstractmethod
    def dp_rank(self) -> int:
        """Which part of the global batch this rank has."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """How many parts the global batch has."""

    @property
    @abstractmethod
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that differ from this one only in their part of the batch."""

    @property
    @abstractmethod
    def is_main(self) -> bool:
        """True on one rank for each data-parallel coordinate: where a batch's outputs are to be counted once."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Set ``version``, a counter of the weights that the caller keeps; saved with a checkpoint."""

    # ---- a batch

    @abstractmethod
    def microbatches(self, batch: BatchInput) -> MicroBatchList:
        """Check a batch, cut it as ``config.mb_spec`` says, and agree with the other ranks on the number of micro-batches.

        Raises:
            ValueError: some rank's batch is wrong, or ranks of one data-parallel coordinate got different ones; on every rank.
        """

    @abstractmethod
    def global_sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over data-parallel ranks; same shape, dtype and device."""

    @abstractmethod
    def global_weight(
        self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn = default_loss_weight
    ) -> Tensor | dict[str, Tensor]:
        """The loss weights summed over all micro-batches and data-parallel ranks: float64 scalar (or one for each term), on the CPU.

        Raises:
            ValueError: a global weight is 0, negative or not finite, on every rank.
        """

    # ---- verbs

    @abstractmethod
    def forward_backward_batch(
        self,
        mbs: MicroBatchList,
        process_output: ProcessOutputFn,
        *,
        outputs: Outputs = ("logprobs",),
        forward_only: bool = False,
    ) -> list[Any]:
        """Run every micro-batch through the model, and back unless ``forward_only``. The verb under all the others.

        ``process_output(token_outputs, mb)`` gets canonical outputs (packed, unpadded, gathered) and returns
        ``(loss, result)``; the gradient of every ``loss`` is added to what is pending. It is not called for fillers.

        Returns:
            The results, one for each of ``mbs.real``, in order, on every rank.

        Raises:
            ValueError, RuntimeError: what ``process_output`` raised on some rank, on every rank; pending gradients are discarded.
        """

    @abstractmethod
    def forward_backward(
        self,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn = default_loss_weight,
        *,
        outputs: Outputs = ("logprobs",),
        normalization: Normalization = "weight",
        loss_weight: float = 1.0,
    ) -> StepOutput:
        """Add the gradient of ``loss_weight * sum(loss_fn) / normalization`` over the global batch to what is pending.

        Args:
            normalization: ``"weight"`` divides by the global weight, ``"sum"`` by nothing, a positive number by itself.
            loss_weight: scales this call's loss, before backward.

        Raises:
            ValueError: as :meth:`microbatches` and :meth:`global_weight`; a loss that is not finite, not a scalar or has no graph.
        """

    @abstractmethod
    def train_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn = default_loss_weight,
        *,
        outputs: Outputs = ("logprobs",),
    ) -> StepOutput:
        """One optimizer step on one batch.

        Raises:
            RuntimeError: gradients are pending from ``forward_backward``, or the engine has no optimizer.
            ValueError: as :meth:`forward_backward`.
        """

    @abstractmethod
    def eval_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn = default_loss_weight,
        *,
        outputs: Outputs = ("logprobs",),
    ) -> StepOutput:
        """The loss that ``train_batch`` would report, with dropout off; gradients are untouched."""

    @abstractmethod
    def forward_batch(self, batch: BatchInput, *, outputs: Outputs = ("logprobs",)) -> Any:
        """Per-token outputs of this rank's batch, detached, in the caller's order, form and device, with dropout off.

        Returns:
            For one output ``[B, S]`` (``[B, S, ...]``; zeros at padding), or a list of ``[S_i]`` for a list; for several, a dict by name
            (``"topk"`` for :class:`~areal.api.batch.TopK`).
        """

    # ---- optimizer

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard pending gradients."""

    @abstractmethod
    def optimizer_step(self) -> OptimStats:
        """Clip and apply the pending gradients, then discard them.

        Raises:
            RuntimeError: no gradient is pending, or the engine has no optimizer.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate that the next optimizer step will use."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the base learning rate, which the schedule multiplies."""

    # ---- weights

    @abstractmethod
    def named_tensors(self) -> Iterator[NamedTensor]:
        """All weights: full, in ``master_dtype``, under the names in the Hugging Face files, streamed. Collective."""

    @abstractmethod
    def named_gradients(self) -> Iterator[NamedTensor]:
        """All pending gradients, likewise; zeros for a parameter that got none. Collective.

        Raises:
            RuntimeError: no gradient is pending.
        """

    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint, which appears complete or not at all. See :class:`~areal.api.checkpoint.SaveLoadMeta`."""

    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Load a checkpoint written in any layout. Pending gradients are discarded.

        Raises:
            ValueError: there is no complete checkpoint, or it is of another model or damaged; names the file and the key.
        """

    @abstractmethod
    def wait_for_checkpoint(self) -> None:
        """Return when an asynchronous save is published; raise what it raised."""

    @abstractmethod
    def offload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        """Move what is named to host memory and free it on the device. Every verb that needs it brings it back first."""

    @abstractmethod
    def onload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        """Bring what is named back to the device, bit for bit."""

    # ---- adapters

    @property
    @abstractmethod
    def adapters(self) -> Adapters:
        """Low-rank adapters, which are trained instead of the model.

        Raises:
            RuntimeError: ``config.lora`` is ``None``.
        """

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Inside, the model computes without adapters, as it was before training: for ``forward_batch`` and ``eval_batch``.

        Raises:
            RuntimeError: ``config.lora`` is ``None``.
        """

    # ---- profiles

    @abstractmethod
    def profile(self, folder: str | Path, *, memory: bool = True, stacks: bool = False) -> AbstractContextManager[None]:
        """Inside, all that this rank does is profiled; in the end, after an error too, files are written. Not collective.

        ``trace-rank0.json.gz`` (of rank 0) is a trace of torch's profiler, for ``chrome://tracing`` or https://ui.perfetto.dev. A call with a
        loss shows in it as ranges ``data``, ``reduce``, ``optimizer`` and ``schedule``, and in that as ``forward mb 0``, ``backward mb 0`` (in
        Megatron's interleaved pipelines without a number) and so on for each micro-batch.

        ``memory-rank0.json`` has the bytes of all tensors over time, with the phase, and their peak. On a
        CPU bytes are relative to the start. On a GPU ``memory-rank0.pickle`` has each allocation, for https://pytorch.org/memory_viz.

        Calls are slower inside, the first of all most.

        Args:
            folder: made where there is none; files of an earlier profile are replaced.
            memory: write the memory timeline. stacks: note the Python stack of each operation, which costs more.

        Raises:
            RuntimeError: a profiler is on in this process already.
            ValueError: the folder cannot be written.
        """
