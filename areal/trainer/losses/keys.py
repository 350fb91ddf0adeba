"""What a loss looks up in a batch and in a model's outputs, and what it says when something is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from areal.api import Batch, TokenOutputs

OldLogprobs = Literal["old_logprobs", "rollout_logprobs"]
"""Which log-probs a ratio is taken against: the trainer's own before the update, or those recorded when sampled."""

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
"""Keys that losses read: shape, and where the values come from."""


def required(batch: Batch, key: str) -> Tensor:
    """``batch[key]``.

    Raises:
        ValueError: the batch has no such key; says where it comes from.
    """
    if key not in batch:
        raise ValueError(f"the batch has no key {key!r}, which this objective needs: {SOURCES[key]}")
    return batch[key]


def required_like(batch: Batch, key: str, like: Tensor) -> Tensor:
    """``batch[key]``, of the shape of ``like``.

    Raises:
        ValueError: it is missing, or of another shape.
    """
    found = required(batch, key)
    if found.shape != like.shape:
        raise ValueError(
            f"batch[{key!r}] has shape {tuple(found.shape)} where the outputs have {tuple(like.shape)}: it is {SOURCES[key]}"
        )
    return found


def required_output(outputs: TokenOutputs, name: Literal["logprobs", "entropy", "values"]) -> Tensor:
    """``outputs.<name>``.

    Raises:
        ValueError: it was not asked for.
    """
    found = getattr(outputs, name)
    if found is None:
        raise ValueError(f"the loss needs the output {name!r}: pass outputs=objective.outputs to the engine's verb")
    return found


def refuse(field: str, value: Any, want: str) -> None:
    """Raise a ``ValueError`` that names an option, its value and what it may be."""
    raise ValueError(f"{field} = {value!r}: {want}")
