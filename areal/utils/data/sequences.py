"""Build position-aligned sequences, so that user code never shifts tensors by hand.

Index ``t`` of a per-token key refers to the prediction made *at* position ``t``. So a value of the token at ``k`` (its
log-prob, its advantage, its loss weight) is stored at ``k - 1``. The first token of a sequence is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.utils.data.padding import closing_order, pad, row_lengths, take_columns


def from_prompt_response(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    *,
    loss_mask: Tensor | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Concatenate prompts and responses to one right-padded batch.

    Args:
        prompt_ids: int64 ``[n, P]``, padded on either side.
        prompt_mask: ``[n, P]``. 1 at real tokens, at least one in each row.
        response_ids: int64 ``[n, R]``, right-padded.
        response_mask: ``[n, R]``. 1 at real tokens.
        loss_mask: ``[n, R]``. Weight of each response token in the loss (0 for output of a tool). Defaults to 1.
        values: per-token keys ``[n, R, ...]``. Index ``j`` refers to response token ``j`` (behaviour log-probs, advantages).

    Returns:
        A batch ``[n, S]`` with ``input_ids``, ``attention_mask`` (bool), ``loss_mask`` (float32 by default) and the keys of
        ``values``. The value of response token ``j`` is at the position that predicts it; other positions are zero. ``S`` is
        the longest sequence.

    Raises:
        ValueError: shapes do not match, a prompt is empty, a response is not right-padded, or a key has a reserved name.
    """
    values = dict(values or {})
    _check_prompt_response(prompt_ids, prompt_mask, response_ids, response_mask)
    about_response = {**values, "loss_mask": response_mask.float() if loss_mask is None else loss_mask}
    reserved = {"input_ids", "attention_mask", "loss_mask"}.intersection(values)
    if reserved:
        raise ValueError(
            f"values has the keys {sorted(reserved)}, which the batch gets from other arguments: rename or leave them out"
        )
    for key, value in about_response.items():
        if value.shape[:2] != response_ids.shape:
            raise ValueError(
                f"{key!r} is {list(value.shape)}: its first dims are those of response_ids, {list(response_ids.shape)}"
            )
    # Move real tokens of [prompt, response] to the front of each row, and cut the rows to the longest one.
    real = torch.cat([prompt_mask != 0, response_mask != 0], 1)
    width = int(real.sum(1).max())
    columns = closing_order(real)[:, :width]
    attention_mask = take_columns(real, columns)
    joined = {"input_ids": torch.cat([prompt_ids, response_ids], 1), "attention_mask": attention_mask}
    joined["input_ids"] = take_columns(joined["input_ids"], columns).masked_fill(~attention_mask, 0)
    # Values get zeros for the prompt, move with their tokens, and shift to the positions that predict them.
    for key, value in about_response.items():
        value = _masked_to_zero(response_mask != 0, value)
        value = torch.cat([value.new_zeros((*prompt_ids.shape, *value.shape[2:])), value], 1)
        joined[key] = _shift_to_predictor(take_columns(value, columns))
    return joined


def to_responses(outputs: Tensor | Sequence[Tensor], prompt_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Convert per-token outputs of a batch of :func:`from_prompt_response` to one row for each response.

    Args:
        outputs: ``[n, S, ...]``, or ``n`` tensors ``[S_i, ...]``, as returned by an engine.
        prompt_mask: ``[n, P]``. The mask that was passed to :func:`from_prompt_response`.
        response_mask: ``[n, R]``. The mask that was passed to :func:`from_prompt_response`.

    Returns:
        ``[n, R, ...]``. Index ``j`` refers to response token ``j``; zero at positions with ``response_mask`` 0.

    Raises:
        ValueError: ``outputs`` are too short for these masks, or the number of sequences differs.
    """
    x = outputs if isinstance(outputs, Tensor) else pad(list(outputs))[0]
    real = (response_mask != 0).to(x.device)
    # The last token of the prompt predicts the first token of the response.
    starts = (prompt_mask != 0).to(x.device).sum(1, keepdim=True) - 1
    columns = starts + torch.arange(response_mask.shape[1], device=x.device)
    if len(x) != len(real) or int(torch.where(real, columns, 0).max() if real.numel() else 0) >= x.shape[1]:
        raise ValueError(
            f"outputs of {list(x.shape)} do not hold these prompts and responses ({list(prompt_mask.shape)} and "
            f"{list(response_mask.shape)}): pass "
            f"the masks that the batch was built with"
        )
    return _masked_to_zero(real, take_columns(x, columns.clamp(0, x.shape[1] - 1)))


ROUTED_EXPERTS = "routed_experts"
"""Per-token key of a batch, and an output: the experts of each token, ``[T, L, K]``; -1 where they are not known."""


@dataclass(frozen=True)
class Segment:
    """A segment of an agent's trajectory: consecutive tokens that the policy generated, or that it received.

    Attributes:
        tokens: integers ``[m]``. Token ids.
        trainable: whether the policy generated the tokens and is trained on them.
        values: per-token keys ``[m, ...]`` (behaviour log-probs, advantages).
        sampling: parameters with which the policy sampled the tokens, by name (``temperature``, ``top_p``, ...). Empty if unknown.
    """

    tokens: Sequence[int] | Tensor
    trainable: bool
    values: Mapping[str, Sequence[float] | Tensor] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)


def from_segments(segments: Sequence[Segment]) -> dict[str, Tensor]:
    """Concatenate the segments of one trajectory to one sample of a list batch.

    The first token of the trajectory is not predicted: it does not enter the loss, and its values are dropped.

    Args:
        segments: segments in order. Values of a key that a segment does not have are zero, and of ``routed_experts`` -1.

    Returns:
        ``input_ids`` int64 ``[S]``, ``loss_mask`` float32 ``[S]`` (1 at positions that predict a trainable token), and each
        key of ``values``, ``[S, ...]``, at the positions that predict its tokens. If the segments have one, also the scalar
        ``temperature``, by which an engine divides the logits of this sequence. Greedy answers (0) have 1.

    Raises:
        ValueError: there are no tokens, a key does not have one value for each token, a reserved name is used, shapes differ
            between segments, or trainable segments were sampled at different temperatures.
    """
    ids = [torch.as_tensor(segment.tokens, dtype=torch.int64) for segment in segments]
    if not sum(len(x) for x in ids):
        raise ValueError("from_segments got no tokens: pass at least one segment that has some")
    weights = [
        torch.full(x.shape, float(segment.trainable), device=x.device) for x, segment in zip(ids, segments, strict=True)
    ]
    out = {"input_ids": torch.cat(ids), "loss_mask": _shift_to_predictor(torch.cat(weights)[None])[0]}
    # The divisor of the logits belongs to the sequence, because an engine has one per sequence.
    temperatures = sorted(
        {s.sampling["temperature"] or 1.0 for s in segments if s.trainable and "temperature" in s.sampling}
    )
    if len(temperatures) > 1:
        raise ValueError(
            f"the trainable segments were sampled at the temperatures {temperatures}, and a sample has one: sample all turns at "
            "one temperature, or make a sample for each"
        )
    if temperatures:
        out["temperature"] = torch.tensor(temperatures[0], dtype=torch.float32)
    # All keys of all segments, in the order of their first occurrence.
    for key in dict.fromkeys(key for segment in segments for key in segment.values):
        if key in out:
            raise ValueError(
                f"a segment has values of the name {key!r}, which the builder makes itself: rename or leave them out"
            )
        column = torch.cat(_column(key, segments, ids))[None]
        out[key] = _shift_to_predictor(column, _unknown(key))[0]
    return out


def _column(key: str, segments: Sequence[Segment], ids: list[Tensor]) -> list[Tensor]:
    """Return the values of a key for each segment, also for segments without the key."""
    given = {i: torch.as_tensor(segment.values[key]) for i, segment in enumerate(segments) if key in segment.values}
    # Trailing shape and dtype, from the first values that are not empty.
    like = next((x for x in given.values() if x.numel()), next(iter(given.values())))
    column = []
    for i, tokens in enumerate(ids):
        shape = (len(tokens), *like.shape[1:])
        x = given.get(i, like.new_full(shape, _unknown(key)))
        if x.shape != shape and (len(tokens) or x.numel()):
            raise ValueError(
                f"values {key!r} of segment {i} are {list(x.shape)}: expected {list(shape)}, one for each of its tokens"
            )
        column.append(x.reshape(shape))
    return column


def where_trained(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Request log-probs and entropy only at positions that are trained on, so that the output head computes only these.

    Args:
        sample: sample with ``loss_mask`` ``[S]``, or a padded batch.

    Returns:
        A copy with ``output_mask``: True if ``loss_mask`` is not 0.
    """
    return {**sample, "output_mask": sample["loss_mask"] != 0}


@overload
def from_hf_labels(batch: Mapping[str, Any]) -> dict[str, Any]: ...
@overload
def from_hf_labels(batch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]: ...


def from_hf_labels(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    """Convert ``labels`` of Hugging Face models to ``target_ids`` and ``loss_mask``.

    In Hugging Face batches, ``labels[t]`` is the token at ``t`` itself, or -100 without a loss, and the model shifts. Here,
    ``target_ids[t]`` is ``labels[t + 1]``, and ``loss_mask[t]`` is 1 if that is a token. Can be called before or after
    :func:`~areal.utils.data.padding.from_left_padded`.

    Args:
        batch: dict with ``labels`` ``[B, S]`` and optionally ``attention_mask``, or list of dicts with ``labels`` ``[S_i]``.

    Returns:
        A copy without ``labels``, with ``target_ids`` int64 and ``loss_mask`` float32. Other keys are the caller's tensors.

    Raises:
        ValueError: ``labels`` are missing or do not have the shape of ``input_ids``, or the batch already has targets or a
            loss mask.
    """
    if not isinstance(batch, Mapping):
        return [from_hf_labels(sample) for sample in batch]
    labels, ids, mask = batch.get("labels"), batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape:
        raise ValueError(
            "from_hf_labels needs labels and input_ids, two tensors of one shape ([B, S], or [S_i] in a list)"
        )
    clash = sorted({"target_ids", "loss_mask"} & batch.keys())
    if clash:
        raise ValueError(f"the batch has labels and also {clash}: leave out one or the other")
    # Shift by one. The last position is without a target, and so is a position next to padding.
    targets = torch.full_like(labels, IGNORE_INDEX, dtype=torch.int64)
    targets[..., :-1] = labels[..., 1:]
    if mask is not None:
        real = mask != 0
        targets[..., :-1].masked_fill_(~(real[..., 1:] & real[..., :-1]), IGNORE_INDEX)
    rest = {key: value for key, value in batch.items() if key != "labels"}
    return {**rest, "target_ids": targets, "loss_mask": (targets != IGNORE_INDEX).float()}


def _check_prompt_response(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor
) -> None:
    for name, ids, mask in (("prompt", prompt_ids, prompt_mask), ("response", response_ids, response_mask)):
        if ids.dim() != 2 or ids.shape != mask.shape:
            raise ValueError(
                f"{name}_ids is {list(ids.shape)} and {name}_mask {list(mask.shape)}: give both one shape of two dims"
            )
    if len(prompt_ids) != len(response_ids):
        raise ValueError(
            f"there are {len(prompt_ids)} prompts and {len(response_ids)} responses: repeat a prompt for each of its "
            "responses"
        )
    if len(prompt_ids) == 0:
        raise ValueError("there are no prompts: pass at least one")
    # The last token of the prompt predicts the first token of the response.
    empty = (prompt_mask == 0).all(1)
    if bool(empty.any()):
        raise ValueError(
            f"prompt {int(empty.nonzero()[0])} has no tokens, so nothing predicts its response: begin it with a BOS "
            "token"
        )
    try:
        row_lengths(response_mask)
    except ValueError as error:
        raise ValueError(
            f"response_mask marks real tokens, right-padded; what is not trained on goes in loss_mask. {error}"
        ) from None


def _masked_to_zero(keep: Tensor, x: Tensor) -> Tensor:
    """Set ``x`` to zero at positions that are False in ``keep``, including NaN in the padding."""
    return x.masked_fill(~keep.reshape(*keep.shape, *[1] * (x.dim() - keep.dim())), 0)


def _unknown(key: str) -> int:
    """Return the value of tokens without one."""
    return -1 if key == ROUTED_EXPERTS else 0


def _shift_to_predictor(x: Tensor, last: int = 0) -> Tensor:
    """Shift per-token values ``[n, S, ...]`` to the positions that predict their tokens: one earlier. The ``last`` position predicts none."""
    out = torch.full_like(x, last)
    out[:, :-1] = x[:, 1:]
    return out
