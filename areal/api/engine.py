"""Interface of every train engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from areal.api.adapters import Adapters
from areal.api.arguments import BatchInput, Outputs, default_loss_weight
from areal.api.batch import OptimStats, StepOutput
from areal.api.checkpoint import SaveLoadMeta
from areal.api.config import FinetuneSpec, TrainEngineConfig
from areal.api.control import Control
from areal.api.loss import LossFn, LossObjective, LossWeightFn, Normalization, ProcessOutputFn
from areal.api.memory import Offloadable
from areal.api.microbatch import MicroBatchList
from areal.api.parallel import ParallelDims, RankPosition
from areal.api.pending import Finished, Pending
from areal.api.sections.microbatch import MicroBatchSpec
from areal.api.step_settings import ParamGroup, StepSettings
from areal.api.weights import LocalTensor, NamedTensor, SelectName

__all__ = ["BatchInput", "Outputs", "TrainEngine", "default_loss_weight"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Mapping[str, Any])


class TrainEngine(RankPosition, Offloadable):
    """A model with its optimizer on a layout of ranks.

    Every verb is collective: all ranks of the layout call it, in the same order. Each data-parallel rank passes its own samples. Ranks that
    share a data-parallel coordinate (context-, tensor- and pipeline-parallel ranks) pass the same batch. A rank may pass an empty batch.

    The ``mb_spec`` of a call cuts the batch of this call, in place of ``config.mb_spec``. Pass an equal one on all ranks.

    An error on one rank (a bad batch, a loss that raises) is raised on all ranks and names the rank that caused it. The engine can be used
    for the next call unless the message says otherwise.

    Shapes: ``B`` samples of width ``S``; ``n`` packed sequences with ``T`` tokens in total; vocabulary ``V``. Log-probs and entropies are in
    nats.

    Attributes:
        config: configuration that the engine was created with.
        dims: parallel layout, parsed from ``config.backend``.
        device: device of this rank.
        control: exchanges values between all ranks, for what is made on them, such as weight transports.
        version: counter of the weights, set by the caller.
    """

    config: TrainEngineConfig
    dims: ParallelDims
    device: torch.device
    control: Control
    version: int

    # ---- life cycle

    @abstractmethod
    def initialize(self, spec: FinetuneSpec) -> None:
        """Join the process group, build and load the model, and create the optimizer.

        If there is no default process group, one is started: from the environment variables of torchrun, or with a world of one rank.

        Args:
            spec: length of the run, for the learning-rate schedule.

        Raises:
            ValueError: the layout does not fit the world or the engine, or the model is not supported. Raised on all ranks.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Finish an asynchronous save, and free the model, the optimizer and this engine's process groups. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def start(self, verb: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start a verb, and return its future: ``engine.start(TrainEngine.forward_batch, batch)``.

        An engine runs the verb at once. A group of ranks returns before the verb ends, so that groups on separate devices run together.
        """
        return Finished(getattr(self, verb.__name__)(*args, **kwargs))

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Set ``version``, the caller's counter of the weights. A checkpoint saves it."""

    # ---- batches

    def put(self, samples: list[S]) -> list[S]:
        """Return samples that the verbs of all groups of ranks take by reference. An engine returns its argument.

        The tensors of samples are found again by their identity, also in copies with further keys, ``sample | {...}``.
        """
        return samples

    @abstractmethod
    def microbatches(self, batch: BatchInput, *, mb_spec: MicroBatchSpec | None = None) -> MicroBatchList:
        """Check a batch, cut it into micro-batches, and agree on their number with all ranks.

        Args:
            batch: samples of this data-parallel rank. Not modified.
            mb_spec: rules of the cut. Default: ``config.mb_spec``.

        Returns:
            Packed micro-batches: those of this rank, and fillers if other ranks have more.

        Raises:
            ValueError: the batch of some rank is invalid, ranks of one data-parallel coordinate passed different batches, or no rank has a
                sample. Raised on all ranks, before the model runs.
        """

    @abstractmethod
    def global_sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over data-parallel ranks, with its shape, dtype and device. Bitwise equal on all ranks."""

    @abstractmethod
    def global_weight(
        self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn = default_loss_weight
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss weights summed over all micro-batches and data-parallel ranks.

        Args:
            mbs: micro-batches of this rank.
            loss_weight_fn: weight of one micro-batch: a scalar, or a dict of scalars.

        Returns:
            float64 scalar on the CPU, or a dict of them if ``loss_weight_fn`` returns a dict.

        Raises:
            ValueError: a global weight is 0, negative or not finite. Raised on all ranks.
        """

    # ---- forward and backward

    @abstractmethod
    def forward_backward_batch(
        self,
        mbs: MicroBatchList,
        process_output: ProcessOutputFn,
        *,
        outputs: Outputs = ("logprobs",),
        forward_only: bool = False,
    ) -> list[Any]:
        """Run the forward, and unless ``forward_only`` the backward, of every micro-batch. All other verbs call this one.

        ``process_output(token_outputs, mb)`` receives packed, unpadded outputs, gathered over context-parallel ranks. It returns ``(loss,
        result)``. The gradient of each ``loss`` (a scalar, or ``None``) is accumulated into the pending gradients, without further scaling
        by the caller. It is not called for fillers.

        Args:
            mbs: micro-batches of this rank.
            process_output: called once per micro-batch, on ranks that have the model's outputs.
            outputs: per-token outputs to compute.
            forward_only: compute no gradients.

        Returns:
            One result per micro-batch in ``mbs.real``, in that order, on all ranks.

        Raises:
            ValueError, RuntimeError: an error that ``process_output`` raised on some rank, raised on all ranks. Pending gradients are
                discarded.
        """

    @abstractmethod
    def forward_backward(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        normalization: Normalization = "weight",
        loss_weight: float = 1.0,
        returns: Outputs = (),
        mb_spec: MicroBatchSpec | None = None,
    ) -> StepOutput:
        """Accumulate the gradient of ``loss_weight * sum(loss_fn) / normalization`` over the global batch.

        Args:
            batch: samples of this data-parallel rank.
            loss_fn: returns the **sum** of the loss over a micro-batch, and optionally metrics. Or an objective, with all three.
            loss_weight_fn: weight of a micro-batch. Default: that of the objective, or :func:`default_loss_weight`.
            outputs: per-token outputs that ``loss_fn`` reads. Default: those of the objective, or ``("logprobs",)``.
            normalization: ``"weight"`` divides by the global weight, ``"sum"`` by 1, a positive number by that number. Not ``"weight"`` if
                samples name several adapters.
            loss_weight: factor of this call's loss.
            returns: per-token outputs that the result has in ``outputs``, from the pass that computes the gradient.

        Returns:
            Loss and metrics of the global batch, equal on all ranks. ``grad_norm``, ``lr`` and ``update_successful`` are ``None``.

        Raises:
            ValueError: see :meth:`microbatches` and :meth:`global_weight`; or a loss is not finite, not a scalar, or without a graph.
        """

    @abstractmethod
    def train_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        returns: Outputs = (),
        mb_spec: MicroBatchSpec | None = None,
    ) -> StepOutput:
        """Take one optimizer step on one batch: :meth:`forward_backward`, with its arguments, followed by :meth:`optimizer_step`.

        Returns:
            Loss and metrics of the global batch and statistics of the optimizer step, equal on all ranks.

        Raises:
            RuntimeError: gradients are pending from :meth:`forward_backward`, or the engine was created without an optimizer.
            ValueError: see :meth:`forward_backward`.
        """

    @abstractmethod
    def eval_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        returns: Outputs = (),
        mb_spec: MicroBatchSpec | None = None,
    ) -> StepOutput:
        """Return the loss that :meth:`train_batch` would report, with dropout disabled. Gradients are not changed.

        Arguments and errors are those of :meth:`forward_backward`.
        """

    @abstractmethod
    def forward_batch(
        self, batch: BatchInput, *, outputs: Outputs = ("logprobs",), mb_spec: MicroBatchSpec | None = None
    ) -> Any:
        """Return per-token outputs of this rank's batch, detached, with dropout disabled.

        Args:
            batch: samples of this data-parallel rank.
            outputs: per-token outputs to compute.

        Returns:
            In the caller's order and on the caller's device. For one output: ``[B, S, ...]`` with zeros at padding if ``batch`` is a dict,
            or a list of ``[S_i, ...]`` if it is a list (``[]`` if empty). For several outputs: a dict of those by name (``"topk"`` for
            :class:`~areal.api.batch.TopK`).

        Raises:
            ValueError: see :meth:`microbatches`.
        """

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context that disables dropout, for :meth:`forward_backward_batch` with ``forward_only``; other verbs need none."""

    # ---- optimizer

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard pending gradients."""

    @abstractmethod
    def optimizer_step(self, settings: StepSettings | None = None) -> OptimStats:
        """Clip and apply the pending gradients, then discard them. A gradient that is not finite skips the update.

        Args:
            settings: replace the configured ones in this step only. Equal on all ranks.

        Returns:
            Statistics of the step, equal on all ranks.

        Raises:
            RuntimeError: no gradient is pending, or the engine was created without an optimizer.
            ValueError: the optimizer does not have one of the settings. Gradients stay pending.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the base learning rate, which the schedule multiplies."""

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The optimizer's parameter groups, of which there is one: a view with the key ``"lr"``."""
        return [ParamGroup(self)]

    # ---- weights and checkpoints

    @abstractmethod
    def named_tensors(
        self, *, dtype: torch.dtype | None = None, select: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        """Yield weights, full (unsharded), under their Hugging Face names.

        Collective: every rank iterates to the end. One tensor at a time is materialised, on ``device``.

        Args:
            dtype: dtype of the tensors. Default: ``master_dtype``.
            select: returns True for the names to yield; the same on all ranks. Default: all.
        """

    @abstractmethod
    def local_tensors(
        self, *, dtype: torch.dtype | None = None, select: SelectName | None = None
    ) -> Iterator[LocalTensor]:
        """Yield the parts of the weights that this rank holds, without communication. Arguments as for :meth:`named_tensors`.

        Each element of a weight is on at least one rank. Parts may share memory with the engine: the next step changes them. The call itself is
        collective; reading the iterator is not.

        Raises:
            RuntimeError: this is a group, whose parts are on its ranks: call it there, in a function of ``run``.
        """

    @abstractmethod
    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield all pending gradients in the form of :meth:`named_tensors`, with zeros for parameters without a gradient. Collective.

        Raises:
            RuntimeError: no gradient is pending.
        """

    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint. Its directory appears complete or not at all.

        Args:
            meta: path, format and content; see :class:`~areal.api.checkpoint.SaveLoadMeta`.
        """

    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Load a checkpoint written on any layout. Pending gradients are discarded. ``meta`` as for :meth:`save`.

        Raises:
            ValueError: the checkpoint is missing, incomplete or damaged, or of another model. Names the file and the key.
        """

    @abstractmethod
    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is complete, and raise its error if it failed."""

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
        """Return a context in which ``forward_batch`` and ``eval_batch`` use the model without adapters, as it was before training.

        Raises:
            RuntimeError: ``config.lora`` is ``None``.
        """

    # ---- profiling

    @abstractmethod
    def profile(
        self, folder: str | Path, *, memory: bool = True, stacks: bool = False
    ) -> AbstractContextManager[dict[int, Path]]:
        """Return a context that profiles this rank and writes files on exit, also after an error. Not collective.

        ``with engine.profile(folder) as folders`` gives the directory's absolute path by rank: of each profiled rank behind this handle.
        The page *Profiling* describes the files of each rank. Calls inside the context are slower, most of all the first.

        Args:
            folder: output directory. Created if it is missing; files of an earlier profile are replaced.
            memory: write the memory timeline.
            stacks: record the Python stack of each operation, at a further cost in time.

        Raises:
            RuntimeError: another profiler is active in this process.
            ValueError: the directory cannot be written.
        """
