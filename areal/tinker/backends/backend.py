"""Interfaces of a backend that trains, and of one that samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import (
    AdamParams,
    AdapterSpec,
    PassResult,
    PreparedBatch,
    SamplingRequest,
    SamplingResult,
)

if TYPE_CHECKING:  # the HTTP layer imports this module, and no torch
    from torch import Tensor


@dataclass(frozen=True)
class ModelLimits:
    """Sizes against which requests are checked before they run.

    Attributes:
        vocab_size: number of token ids.
        max_tokens: most tokens of one sample.
        max_rank: largest rank of an adapter.
    """

    vocab_size: int
    max_tokens: int
    max_rank: int


class TrainingBackend(Protocol):
    """One base model with many adapters, in the verbs of the protocol.

    All methods are called from one thread, one after the other. Requests arrive validated, in the order in which they take effect. An adapter
    never changes another's bits. Every method raises :class:`UserError` for what the client can mend, and
    :class:`~areal.tinker.backends.errors.BackendLostError` after the loss of a process.
    """

    def limits(self) -> ModelLimits:
        """Return the sizes against which requests are checked."""

    def losses(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """Return the losses: ``inputs`` (required keys of a datum), ``optional`` and ``config`` keys, by the protocol's name."""

    def optimizers(self) -> frozenset[str]:
        """Return the protocol's names of the optimizers."""

    def batches_models(self) -> bool:
        """Return whether :meth:`forward_backward` gains from requests of several models in one call."""

    def create_model(self, model_id: str, adapter: AdapterSpec) -> None:
        """Add an adapter, whose ``B`` is zero.

        Raises:
            UserError: memory is short: the message says how much is available and how much the adapter needs.
        """

    def forward(self, batches: Sequence[PreparedBatch]) -> list[PassResult | UserError | ServerError]:
        """Return the log-probs and the loss of each request. Gradients are not changed."""

    def forward_backward(self, batches: Sequence[PreparedBatch]) -> list[PassResult | UserError | ServerError]:
        """Add the gradient of each request's summed loss to its model's pending gradients. A request that fails adds nothing."""

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """Apply pending gradients (zeros if there are none), and return metrics by name with the suffix of their reduction.

        Raises:
            UserError: the gradient is not finite. The adapter and its moments are unchanged; the gradient is discarded.
        """

    def save(self, model_id: str, folder: Path) -> None:
        """Write the adapter with its optimizer state to a new folder, which appears complete or not at all."""

    def save_for_sampler(self, model_id: str, folder: Path) -> None:
        """Write the adapter for :class:`SamplingBackend`, in peft's format."""

    def save_external(self, model_id: str, folder: Path) -> None:
        """Write the adapter for download to a new folder, which appears complete or not at all: ``adapter_config.json`` and
        ``adapter_model.safetensors``, with the names that the cookbook's ``build_hf_model`` merges."""

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> AdapterSpec:
        """Create or replace the adapter of a model from a folder that :meth:`save` wrote, and return its description.

        Raises:
            UserError: the folder is damaged or of another base model.
        """

    def delete(self, model_id: str) -> None:
        """Release an adapter with its gradients and moments."""

    def healthy(self) -> bool:
        """Return whether the next call can succeed. May be called from any thread, at any time; does not block."""

    def restart(self) -> None:
        """Start again after :class:`~areal.tinker.backends.errors.BackendLostError`, without adapters."""

    def close(self) -> None:
        """Release everything. May be called twice."""


class SamplingBackend(Protocol):
    """Samples of the base model and of any number of snapshots of adapters, concurrently. Runs on an event loop."""

    def limits(self) -> ModelLimits:
        """Return the sizes against which requests are checked; ``max_tokens`` is that of prompt and answer together."""

    async def open(self, snapshot: str, folder: Path | None) -> None:
        """Serve the adapter in ``folder``, or the base model for ``None``, under the name ``snapshot``, until :meth:`release`.

        The weights are read now: later changes of the folder have no effect. May be called twice.

        Raises:
            UserError: the folder is damaged or of another base model.
        """

    async def release(self, snapshot: str) -> None:
        """Stop serving a snapshot, and free its weights once running requests have ended."""

    async def sample(self, snapshot: str, request: SamplingRequest) -> SamplingResult:
        """Return the answers to a request. Cancelling the task ends its generation.

        Raises:
            UserError: the request does not fit the model.
            ServerError: generation failed.
        """

    def healthy(self) -> bool:
        """Return whether the next call can succeed. Does not block."""

    async def close(self) -> None:
        """Release everything. May be called twice."""


@runtime_checkable
class LendsParameters(Protocol):
    """A training backend whose base model a sampler of the same process can read."""

    def base_parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters of the base model that are whole in this process, by their names in transformers."""


@runtime_checkable
class BorrowsParameters(Protocol):
    """A sampling backend that can read the base model of a training backend, in place of its own."""

    def borrow(self, parameters: Mapping[str, Tensor]) -> int:
        """Use these parameters where dtype and device are those of its own, whose memory is freed. Returns their bytes."""


class TrainingFactory(Protocol):
    """Entry point of the group ``areal.tinker_backends``. The part of ``--backend`` before the first colon is its name."""

    def __call__(self, model: str, backend: str, config: Mapping[str, Any]) -> TrainingBackend:
        """Return a started backend.

        Args:
            model: directory or hub name of the base model.
            backend: the whole of ``--backend``, such as ``fsdp:d2``.
            config: content of ``--backend-config``.

        Raises:
            ValueError: a setting is unknown or out of range. Names the field, the value and the way out.
        """


class SamplingFactory(Protocol):
    """Entry point of the group ``areal.tinker_samplers``, whose name is the value of ``--sampler``."""

    def __call__(self, model: str, config: Mapping[str, Any]) -> SamplingBackend:
        """Return a started backend. ``config`` is the content of ``--sampler-config``. Raises as :class:`TrainingFactory` does."""
