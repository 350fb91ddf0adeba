"""Targets of packed sequences: the token predicted at each position, and checks against the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX


def add_targets(tokens: Mapping[str, Tensor], ends: Tensor) -> dict[str, Tensor]:
    """Add ``target_ids`` to packed per-token keys, and set ``loss_mask`` to 0 at positions without a target.

    Args:
        tokens: ``input_ids`` int64 ``[T]``, and optionally ``target_ids`` ``[T]`` or ``[T, K]``, ``loss_mask`` ``[T, ...]`` of
            any dtype, and ``output_mask`` ``[T]``, which removes targets at positions with 0.
        ends: int64 ``[n]``. Last position of each sequence in ``T``.

    Returns:
        A new dict. ``target_ids`` default to the next token of the sequence, and to ``IGNORE_INDEX`` at its last position.
    """
    out = dict(tokens)
    if "target_ids" not in out:
        # Computed from complete sequences, before context parallelism slices them: a slice does not know its next token.
        out["target_ids"] = out["input_ids"].roll(-1).index_fill_(0, ends, IGNORE_INDEX)
    # A position without outputs is without a target; a position without a target does not count in the loss.
    if "output_mask" in out:
        out["output_mask"] = out["output_mask"] != 0
        wanted = out["output_mask"].view(-1, *[1] * (out["target_ids"].dim() - 1))
        out["target_ids"] = out["target_ids"].masked_fill(~wanted, IGNORE_INDEX)
    if "loss_mask" in out:
        out["loss_mask"] = _masked(out["loss_mask"], out["target_ids"] == IGNORE_INDEX)
    return out


def _masked(loss_mask: Tensor, missing: Tensor) -> Tensor:
    """Set ``loss_mask`` to 0 at missing targets. With K targets per position and one weight, all K must be missing."""
    if loss_mask.shape != missing.shape:
        if missing.dim() > 1:
            missing = missing.flatten(1).all(1)
        missing = missing.reshape(-1, *[1] * (loss_mask.dim() - 1))
    return loss_mask.masked_fill(missing, 0)


def check_target_shape(target_ids: Tensor) -> None:
    """Raise unless targets are integers ``[T]`` or ``[T, K]``.

    Raises:
        ValueError: the error names the dtype or the shape.
    """
    if target_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target_ids is {target_ids.dtype}: token ids are int64 (or int32); convert with .long()")
    if target_ids.dim() > 2 or 0 in target_ids.shape[1:]:
        raise ValueError(
            f"target_ids has {list(target_ids.shape[1:])} targets at a position: give one ([B, S]) or K of them ([B, "
            "S, K])"
        )


def check_output_mask(output_mask: Tensor) -> None:
    """Raise unless the output mask is one number (or bool) per token.

    Raises:
        ValueError: the error names the shape.
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
    """Raise if token ids are outside the vocabulary, or temperatures are not positive. Reads the device once if all is well.

    Args:
        tokens: packed ``input_ids``, and the caller's ``target_ids``, if any. int64, at least one token.
        temperature: temperatures of the batch, if any.
        vocab_size: upper bound of the ids. ``None``: only negative ids are refused.
        samples: index in the caller's batch of each packed sequence, for the message.
        seqlens: number of tokens of each packed sequence.

    Raises:
        ValueError: the error names the key, the sample, the position and the value.
    """
    # Smallest and largest id of each key, with IGNORE_INDEX replaced by a valid id.
    limit = vocab_size if vocab_size is not None else torch.iinfo(torch.int64).max
    checked = {"input_ids": tokens["input_ids"]}
    if "target_ids" in tokens:
        checked["target_ids"] = tokens["target_ids"].masked_fill(tokens["target_ids"] == IGNORE_INDEX, 0)
    extremes = [x for ids in checked.values() for x in ids.aminmax()]
    bad_temperature = [] if temperature is None else [(~(torch.isfinite(temperature) & (temperature > 0))).any().long()]
    # Read all numbers at once.
    values = torch.stack(extremes + bad_temperature).tolist()
    for i, (key, ids) in enumerate(checked.items()):
        if values[2 * i] < 0 or values[2 * i + 1] >= limit:
            raise _bad_id(key, ids, limit, vocab_size, samples, seqlens)
    if bad_temperature and values[-1]:
        raise ValueError(
            "key 'temperature' holds a value that is not finite and above 0: every temperature divides logits"
        )


def _bad_id(
    key: str, ids: Tensor, limit: int, vocab_size: int | None, samples: Sequence[int], seqlens: Sequence[int]
) -> ValueError:
    """Return the error for the first id outside the vocabulary. Searched only now that there is one."""
    position = int(((ids < 0) | (ids >= limit)).nonzero()[0, 0])
    row = ids[position].reshape(-1)
    value = int(row[(row < 0) | (row >= limit)][0])
    # From the packed position to the sample and the position in it.
    ends = list(accumulate(seqlens))
    nth = next(i for i, end in enumerate(ends) if position < end)
    size = "the vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size}"
    hint = f"; {IGNORE_INDEX} marks a position without a target" if key == "target_ids" else ""
    return ValueError(
        f"{key} of sample {samples[nth]} at position {position - ends[nth] + seqlens[nth]} is {value}, outside {size}: "
        f"check that the tokenizer is the model's{hint}"
    )
