"""Access to the batch keys and model outputs that a loss reads, with errors that say where a missing one comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from areal.api import Batch, TokenOutputs

OldLogprobs = Literal["old_logprobs", "rollout_logprobs", "logprobs"]
"""Denominator of a ratio: the batch's log-probs of the trainer before the update, or those recorded during sampling; or ``"logprobs"``, the
current ones without their gradient. That ratio is 1 and has a gradient: it is for one update per batch, and needs no forward before it."""

SOURCES: Mapping[str, str] = {
    "loss_mask": "[T], what each position weighs; the builders of areal.utils.data make it",
    "advantages": "[T], one for each token, 0 or anything where loss_mask is 0",
    "rollout_logprobs": "[T], of the policy that sampled, recorded when it sampled",
    "old_logprobs": "[T], the trainer's own before the update: engine.forward_batch(batch)",
    "ref_logprobs": "[T], of the reference model: reference_engine.forward_batch(batch)",
    "old_values": "[T], of the critic before the update: engine.forward_batch(batch, outputs=('values',))",
    "returns": "[T], what the critic should say: advantages plus old values, or the discounted rewards",
    "rewards": "[n], one for each sequence",
    "teacher_logprobs": "[T, K], the teacher's log-probs of target_ids [T, K]",
    "group_tokens": "[n], the sum of loss_mask over all sequences of the group that the sequence belongs to",
}
"""Batch keys that losses read: shape and origin. A loss that reads a new key adds an entry."""


def required(batch: Batch, key: str) -> Tensor:
    """Return ``batch[key]``, one of :data:`SOURCES`.

    Raises:
        ValueError: the key is missing; the message says where it comes from.
    """
    if key not in batch:
        raise ValueError(f"the batch has no key {key!r}, which this objective needs: {SOURCES[key]}")
    return batch[key]


def required_like(batch: Batch, key: str, like: Tensor) -> Tensor:
    """Return ``batch[key]``, checked to have the shape of ``like``.

    Raises:
        ValueError: the key is missing, or its shape differs.
    """
    tensor = required(batch, key)
    if tensor.shape != like.shape:
        raise ValueError(
            f"batch[{key!r}] has shape {tuple(tensor.shape)} where the outputs have {tuple(like.shape)}: it is {SOURCES[key]}"
        )
    return tensor


def ratio_denominator(batch: Batch, old: str, logprobs: Tensor) -> Tensor:
    """Return the log-probs that ``old`` names, one of :data:`OldLogprobs` or another key: ``[T]``, of the shape of ``logprobs``.

    Raises:
        ValueError: the key is missing, or its shape differs.
    """
    return logprobs.detach() if old == "logprobs" else required_like(batch, old, logprobs)


def required_output(outputs: TokenOutputs, name: Literal["logprobs", "entropy", "values"]) -> Tensor:
    """Return ``outputs.<name>``.

    Raises:
        ValueError: the verb was called without this output.
    """
    # Outputs that the verb was not called with are None.
    tensor = getattr(outputs, name)
    if tensor is None:
        raise ValueError(
            f"the loss needs the output {name!r}: pass the objective to the engine's verb, or outputs=objective.outputs"
        )
    return tensor


def refuse(field: str, value: Any, want: str) -> None:
    """Raise a ``ValueError`` with the name of an option, its value and the values it may have."""
    raise ValueError(f"{field} = {value!r}: {want}")
