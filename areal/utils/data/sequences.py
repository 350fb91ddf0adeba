"""Builders of position-aligned sequences, so that user code never shifts anything by hand.

What stands at ``t`` speaks of the prediction made *at* ``t``: a value about the token at ``k`` (its log-prob, its
advantage, whether it is trained on) stands at ``k - 1``. The first token of a sequence is predicted by nothing.
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
    """Join prompts and responses to one right-padded batch.

    Args:
        prompt_ids: int64 ``[n, P]``, padded on either side.
        prompt_mask: ``[n, P]``, 1 at real tokens, at least one in each row.
        response_ids: int64 ``[n, R]``, right-padded.
        response_mask: ``[n, R]``, 1 at real tokens.
        loss_mask: ``[n, R]``, what each response token weighs in the loss (0 for a tool's output); 1 for each by
            default.
        values: per-token keys ``[n, R, ...]``, whose ``j`` speaks of response token ``j`` (behaviour log-probs,
            advantages).

    Returns:
        A batch ``[n, S]`` with ``input_ids``, ``attention_mask`` (bool), ``loss_mask`` (float32 by default) and the
        keys of ``values``, where what speaks of response token ``j`` stands at the position that predicts it; zeros
        elsewhere. ``S`` is the longest sequence.

    Raises:
        ValueError: shapes do not agree, a prompt is empty, a response is not right-padded, or a key has a taken name.
    """
    values = dict(values or {})
    _check_prompt_response(prompt_ids, prompt_mask, response_ids, response_mask)
    about_response = {**values, "loss_mask": response_mask.float() if loss_mask is None else loss_mask}
    taken = {"input_ids", "attention_mask", "loss_mask"}.intersection(values)
    if taken:
        raise ValueError(
            f"values has the keys {sorted(taken)}, which the batch gets from other arguments: rename or leave them out"
        )
    for key, value in about_response.items():
        if value.shape[:2] != response_ids.shape:
            raise ValueError(
                f"{key!r} is {list(value.shape)}: its first dims are those of response_ids, {list(response_ids.shape)}"
            )
    real = torch.cat([prompt_mask != 0, response_mask != 0], 1)
    width = int(real.sum(1).max())
    columns = closing_order(real)[:, :width]
    attention_mask = take_columns(real, columns)
    joined = {"input_ids": torch.cat([prompt_ids, response_ids], 1), "attention_mask": attention_mask}
    joined["input_ids"] = take_columns(joined["input_ids"], columns).masked_fill(~attention_mask, 0)
    for key, value in about_response.items():
        value = _where(response_mask != 0, value)
        value = torch.cat([value.new_zeros((*prompt_ids.shape, *value.shape[2:])), value], 1)
        joined[key] = _one_earlier(take_columns(value, columns))
    return joined


def to_responses(outputs: Tensor | Sequence[Tensor], prompt_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Read per-token outputs of a batch that :func:`from_prompt_response` built back as one row for each response.

    Args:
        outputs: ``[n, S, ...]``, or ``n`` tensors ``[S_i, ...]``, as an engine returns them.
        prompt_mask: ``[n, P]``, as the builder got it.
        response_mask: ``[n, R]``, likewise.

    Returns:
        ``[n, R, ...]``, whose ``j`` speaks of response token ``j``; zeros where ``response_mask`` is 0.

    Raises:
        ValueError: ``outputs`` are too short for these masks, or of another number of sequences.
    """
    x = outputs if isinstance(outputs, Tensor) else pad(list(outputs))[0]
    real = (response_mask != 0).to(x.device)
    starts = (prompt_mask != 0).to(x.device).sum(1, keepdim=True) - 1
    columns = starts + torch.arange(response_mask.shape[1], device=x.device)
    if len(x) != len(real) or int(torch.where(real, columns, 0).max() if real.numel() else 0) >= x.shape[1]:
        raise ValueError(
            f"outputs of {list(x.shape)} do not hold these prompts and responses ({list(prompt_mask.shape)} and "
            f"{list(response_mask.shape)}): pass "
            f"the masks that the batch was built with"
        )
    return _where(real, take_columns(x, columns.clamp(0, x.shape[1] - 1)))


@dataclass(frozen=True)
class Segment:
    """A piece of an agent's trajectory: tokens that the policy wrote, or that it was given.

    Attributes:
        tokens: ids, integers ``[m]``.
        trainable: whether the policy wrote them and is trained on them.
        values: numbers about each of the tokens, ``[m, ...]`` each (behaviour log-probs, advantages).
    """

    tokens: Sequence[int] | Tensor
    trainable: bool
    values: Mapping[str, Sequence[float] | Tensor] = field(default_factory=dict)


def from_segments(segments: Sequence[Segment]) -> dict[str, Tensor]:
    """Join the segments of one trajectory to one sample of a list batch.

    The first token of all is predicted by nothing: it carries no loss, and values about it are left out.

    Args:
        segments: in order. A key that some of them lack is zero there.

    Returns:
        ``input_ids`` int64 ``[S]``, ``loss_mask`` float32 ``[S]`` (1 at the positions that predict a trainable token),
        and each key of ``values`` ``[S, ...]``, at the position that predicts the token it speaks of.

    Raises:
        ValueError: there are no tokens, a key has not one value for each token, a taken name, or different shapes in
            different segments.
    """
    ids = [torch.as_tensor(segment.tokens, dtype=torch.int64) for segment in segments]
    if not sum(len(x) for x in ids):
        raise ValueError("from_segments got no tokens: pass at least one segment that has some")
    weights = [
        torch.full(x.shape, float(segment.trainable), device=x.device) for x, segment in zip(ids, segments, strict=True)
    ]
    out = {"input_ids": torch.cat(ids), "loss_mask": _one_earlier(torch.cat(weights)[None])[0]}
    for key in dict.fromkeys(key for segment in segments for key in segment.values):
        if key in out:
            raise ValueError(
                f"a segment has values of the name {key!r}, which the builder makes itself: rename or leave them out"
            )
        out[key] = _one_earlier(torch.cat(_column(key, segments, ids))[None])[0]
    return out


def _column(key: str, segments: Sequence[Segment], ids: list[Tensor]) -> list[Tensor]:
    given = {i: torch.as_tensor(segment.values[key]) for i, segment in enumerate(segments) if key in segment.values}
    like = next((x for x in given.values() if x.numel()), next(iter(given.values())))
    column = []
    for i, tokens in enumerate(ids):
        shape = (len(tokens), *like.shape[1:])
        x = given.get(i, like.new_zeros(shape))
        if x.shape != shape and (len(tokens) or x.numel()):
            raise ValueError(
                f"values {key!r} of segment {i} are {list(x.shape)}: expected {list(shape)}, one for each of its tokens"
            )
        column.append(x.reshape(shape))
    return column


def where_trained(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for log-probs and entropy only where a sample is trained on, which spares the output head the rest.

    Args:
        sample: with ``loss_mask`` ``[S]``; a padded batch does as well.

    Returns:
        The same with ``output_mask``, True where ``loss_mask`` is not 0.
    """
    return {**sample, "output_mask": sample["loss_mask"] != 0}


@overload
def from_hf_labels(batch: Mapping[str, Any]) -> dict[str, Any]: ...
@overload
def from_hf_labels(batch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]: ...


def from_hf_labels(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    """Turn ``labels`` as Hugging Face models take them into ``target_ids`` and ``loss_mask``.

    There, ``labels[t]`` is the token at ``t`` itself, or -100 where it has no loss, and the model shifts. Here
    ``target_ids[t]`` is ``labels[t + 1]``, and ``loss_mask[t]`` is 1 where that is a token. Works before or after
    :func:`~areal.utils.data.padding.from_left_padded`.

    Args:
        batch: a dict with ``labels`` ``[B, S]`` and perhaps ``attention_mask``, or a list of dicts with ``[S_i]``.

    Returns:
        The same without ``labels``, with ``target_ids`` int64 and ``loss_mask`` float32; other keys are the caller's
        own.

    Raises:
        ValueError: ``labels`` are missing or not of the shape of ``input_ids``, or there already are targets or a loss
            mask.
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


def _where(keep: Tensor, x: Tensor) -> Tensor:
    """``x`` with zeros where ``keep`` is False, over the trailing dims of ``x``. A NaN in the padding goes as well."""
    return x.masked_fill(~keep.reshape(*keep.shape, *[1] * (x.dim() - keep.dim())), 0)


def _one_earlier(x: Tensor) -> Tensor:
    """From the token that ``x`` ``[n, S, ...]`` speaks of to the position that predicts it."""
    out = torch.zeros_like(x)
    out[:, :-1] = x[:, 1:]
    return out
