"""Targets of packed sequences: what is scored at each position, and the checks that a vocabulary asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX


def add_targets(tokens: Mapping[str, Tensor], ends: Tensor) -> dict[str, Tensor]:
    """Complete packed per-token keys with ``target_ids``, and force ``loss_mask`` to 0 where there is no target.

    Args:
        tokens: ``input_ids`` int64 ``[T]``; perhaps ``target_ids`` ``[T]`` or ``[T, K]``, ``loss_mask`` ``[T, ...]`` of
            any dtype, and ``output_mask`` ``[T]``, which leaves no target where it is 0.
        ends: int64 ``[n]``, the last position of each sequence in ``T``.

    Returns:
        A new dict. ``target_ids`` default to the next token within the sequence, and ``IGNORE_INDEX`` at its last
        position.
    """
    out = dict(tokens)
    if "target_ids" not in out:
        # Made of whole sequences, before anything is sliced: a slice does not know its next token.
        out["target_ids"] = out["input_ids"].roll(-1).index_fill_(0, ends, IGNORE_INDEX)
    if "output_mask" in out:
        out["output_mask"] = out["output_mask"] != 0
        wanted = out["output_mask"].view(-1, *[1] * (out["target_ids"].dim() - 1))
        out["target_ids"] = out["target_ids"].masked_fill(~wanted, IGNORE_INDEX)
    if "loss_mask" in out:
        out["loss_mask"] = _masked(out["loss_mask"], out["target_ids"] == IGNORE_INDEX)
    return out


def _masked(loss_mask: Tensor, missing: Tensor) -> Tensor:
    if loss_mask.shape != missing.shape:
        if missing.dim() > 1:
            missing = missing.flatten(1).all(1)
        missing = missing.reshape(-1, *[1] * (loss_mask.dim() - 1))
    return loss_mask.masked_fill(missing, 0)


def check_target_shape(target_ids: Tensor) -> None:
    """Refuse targets that are not integers ``[T]`` or ``[T, K]``.

    Raises:
        ValueError: names the dtype or the shape.
    """
    if target_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target_ids is {target_ids.dtype}: token ids are int64 (or int32); convert with .long()")
    if target_ids.dim() > 2 or 0 in target_ids.shape[1:]:
        raise ValueError(
            f"target_ids has {list(target_ids.shape[1:])} targets at a position: give one ([B, S]) or K of them ([B, "
            "S, K])"
        )


def check_output_mask(output_mask: Tensor) -> None:
    """Refuse an output mask that is not one number (or bool) per token.

    Raises:
        ValueError: names its shape.
    """
    if output_mask.dim() != 1:
        raise ValueError(f"output_mask has {list(output_mask.shape[1:])} values at a position: give one ([B, S])")


def check_values(
    tokens: Mapping[str, Tensor],
    temperature: Tensor | None,
    vocab_size: int | None,
    samples: Sequence[int],
    seqlens: Sequence[int],
) -> None:
    """Refuse token ids outside the vocabulary and temperatures that are not positive. One host read while all is well.

    Args:
        tokens: packed ``input_ids``, and ``target_ids`` if the caller gave them; int64, of at least one token.
        temperature: the batch's own temperatures, if it has them.
        vocab_size: ids are below it; ``None`` only refuses negative ones.
        samples: which sample of the caller's batch each packed sequence is, for the message.
        seqlens: tokens of each packed sequence.

    Raises:
        ValueError: names the key, the sample, the position and the value.
    """
    limit = vocab_size if vocab_size is not None else torch.iinfo(torch.int64).max
    checked = {"input_ids": tokens["input_ids"]}
    if "target_ids" in tokens:
        checked["target_ids"] = tokens["target_ids"].masked_fill(tokens["target_ids"] == IGNORE_INDEX, 0)
    extremes = [x for ids in checked.values() for x in ids.aminmax()]
    cold = [] if temperature is None else [(~(torch.isfinite(temperature) & (temperature > 0))).any().long()]
    found = torch.stack(extremes + cold).tolist()
    for i, (key, ids) in enumerate(checked.items()):
        if found[2 * i] < 0 or found[2 * i + 1] >= limit:
            raise _bad_id(key, ids, limit, vocab_size, samples, seqlens)
    if cold and found[-1]:
        raise ValueError(
            "key 'temperature' holds a value that is not finite and above 0: every temperature divides logits"
        )


def _bad_id(
    key: str, ids: Tensor, limit: int, vocab_size: int | None, samples: Sequence[int], seqlens: Sequence[int]
) -> ValueError:
    position = int(((ids < 0) | (ids >= limit)).nonzero()[0, 0])
    row = ids[position].reshape(-1)
    value = int(row[(row < 0) | (row >= limit)][0])
    ends = list(accumulate(seqlens))
    nth = next(i for i, end in enumerate(ends) if position < end)
    size = "the vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size}"
    hint = f"; {IGNORE_INDEX} marks a position without a target" if key == "target_ids" else ""
    return ValueError(
        f"{key} of sample {samples[nth]} at position {position - ends[nth] + seqlens[nth]} is {value}, outside {size}: "
        f"check that the tokenizer is the model's{hint}"
    )
