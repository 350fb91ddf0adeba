"""Check a caller's batch, and convert both of its forms to columns: per-token, per-sequence and payload keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal.api import BatchForm, BatchInput, MicroBatchSpec
from areal.utils.data.images import IMAGE_KEYS
from areal.utils.data.padding import row_lengths

PER_TOKEN = frozenset({"input_ids", "attention_mask", "loss_mask", "target_ids", "output_mask"})
"""Keys that are per-token in every batch."""

# Key -> what to do instead.
_RESERVED = {
    "cu_seqlens": "micro-batches get their own; leave it out, and pass packed sequences as a list of samples",
    "labels": "labels do not stand at the position that predicts them; convert the batch with "
    "areal.utils.data.from_hf_labels(batch)",
}

_MEDIA = frozenset(
    {
        *(
            "video_grid_thw",
            "image_sizes",
            "image_position_ids",
            "aspect_ratio_ids",
            "aspect_ratio_mask",
        ),
        *("input_features", "input_features_mask", "feature_attention_mask", "input_values", "audio_values"),
    }
)
"""Keys of images, videos and sound, as the processors of transformers name them, besides those that begin with ``pixel_``."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The keys of a checked batch of ``B`` samples. Tensors are detached views of the caller's tensors.

    Attributes:
        form: form of the caller's batch.
        tokens: per-token keys (with ``input_ids``, without ``attention_mask``), ``B`` tensors ``[S_i, ...]`` each.
        sequences: per-sequence keys, ``[B, ...]``.
        payloads: ``B`` tensors of any shape each.
        meta: the caller's ``meta``.
        images: keys of images as the caller gave them, unchecked; a list has ``None`` for a sample without the key.
    """

    form: BatchForm
    tokens: dict[str, Sequence[Tensor]]
    sequences: dict[str, Tensor]
    payloads: dict[str, Sequence[Tensor]]
    meta: Mapping[str, Any]
    images: Mapping[str, Any] = field(default_factory=dict)


def read_batch(batch: BatchInput, spec: MicroBatchSpec) -> Columns:
    """Check names, types, shapes, devices and padding of a batch. Reads the device once for a padded batch, never for a list.

    A padded batch is a dict of tensors with ``input_ids`` ``[B, S]``. Without ``attention_mask``, every position is real. A
    key is per-token if its first two dimensions are ``[B, S]``, and per-sequence if only its first one is ``B``.

    A list contains one dict for each sample, with ``input_ids`` ``[S_i]`` and the same keys. A key is per-token if it is
    ``[S_i, ...]`` in every sample, and per-sequence if it has the same shape in every sample. An ``attention_mask`` must be
    all ones. ``meta`` must be the same in every sample.

    A list without samples, and a padded batch ``[0, S]``, are valid: the batch of a rank that has nothing to do.

    The shape of a per-sequence row of ``S`` numbers is that of a per-token key: name such keys in ``spec.per_sequence``. A key
    with a row of ``S - 1`` or ``S + 1`` numbers is an error unless it is named there, because it is probably a shifted
    per-token key.

    Raises:
        ValueError: the error names the key, the problem and the way out.
    """
    if isinstance(batch, Mapping):
        return _read_padded(batch, spec)
    if (
        isinstance(batch, Sequence)
        and not isinstance(batch, str | bytes)
        and all(isinstance(sample, Mapping) for sample in batch)
    ):
        return _read_list(batch, spec)
    kind = f"the batch is a {type(batch).__name__}"
    if isinstance(batch, list | tuple):
        wrong = next(sample for sample in batch if not isinstance(sample, Mapping))
        kind += f" with a {type(wrong).__name__}"
    raise ValueError(f"{kind}: pass a dict of padded tensors, or a list with one dict for each sample")


# ---- a dict of padded tensors


def _read_padded(batch: Mapping[str, Any], spec: MicroBatchSpec) -> Columns:
    # input_ids and attention_mask define the shape of the batch.
    _check_names(batch, spec, "the batch")
    ids = _input_ids(batch["input_ids"], 2, "[B, S]")
    rows, width = ids.shape
    if rows and not width:
        raise ValueError(
            f"input_ids is {list(ids.shape)}: a sequence has at least 1 token; pass [0, S] for no sequences"
        )
    lengths = _padded_lengths(batch.get("attention_mask"), ids)
    # Flattened rows alternate between real tokens and padding. One split() is much faster than a slice for each row.
    lengths_and_gaps = [n for length in lengths for n in (length, width - length)]
    # All other keys, by their kind.
    tokens: dict[str, Sequence[Tensor]] = {}
    sequences: dict[str, Tensor] = {}
    payloads: dict[str, Sequence[Tensor]] = {}
    images: dict[str, Any] = {}
    for key, value in batch.items():
        if key in ("attention_mask", "meta"):
            continue
        if key in IMAGE_KEYS:
            images[key] = value
            continue
        if key in spec.payloads:
            payloads[key] = _payload(key, value, rows, ids.device)
            continue
        x = _tensor(key, value, ids.device)
        if _is_per_token(key, x, rows, width, spec):
            tokens[key] = x.flatten(0, 1).split(lengths_and_gaps)[::2]
        else:
            sequences[key] = x
    form = BatchForm(kind="padded", seqlens=tuple(lengths), width=width, device=ids.device)
    return Columns(form, tokens, sequences, payloads, batch.get("meta", {}), images)


def _padded_lengths(mask: Any, ids: Tensor) -> list[int]:
    """Return the number of real tokens of each row."""
    rows, width = ids.shape
    if mask is None:
        return [width] * rows
    mask = _tensor("attention_mask", mask, ids.device)
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} but input_ids {list(ids.shape)}: give both one shape [B, S]"
        )
    # Raises unless rows are right-padded.
    lengths = row_lengths(mask)
    if 0 in lengths:
        row = lengths.index(0)
        raise ValueError(
            f"attention_mask[{row}] is all 0: a sequence has at least 1 token; leave row {row} out of the batch"
        )
    return lengths


def _payload(key: str, value: Any, rows: int, device: torch.device) -> list[Tensor]:
    if not isinstance(value, list | tuple) or len(value) != rows:
        what = f"of {len(value)}" if isinstance(value, list | tuple) else f"but a {type(value).__name__}"
        raise ValueError(f"payload {key!r} is not a list of {rows} tensors {what}: pass one tensor for each sample")
    return [_tensor(f"{key}[{i}]", item, device) for i, item in enumerate(value)]


def _is_per_token(key: str, x: Tensor, rows: int, width: int, spec: MicroBatchSpec) -> bool:
    """Return whether a key of a padded batch is per-token. Raise if it is neither per-token nor per-sequence."""
    shape = list(x.shape)
    per_token = shape[:2] == [rows, width]
    if key in PER_TOKEN and not per_token:
        raise ValueError(f"key {key!r} is {shape}: it is per-token, so its first dims are [B, S] = [{rows}, {width}]")
    if per_token and key not in spec.per_sequence:
        return True
    # Otherwise the key must be per-sequence.
    if shape[:1] != [rows]:
        raise ValueError(
            f"key {key!r} is {shape}: neither per-token, [B, S, ...] = [{rows}, {width}, ...], nor per-sequence, [B, "
            f"...] = [{rows}, ...]; "
            f"reshape it, or move what is one value for the whole batch to 'meta'"
        )
    if key not in spec.per_sequence and len(shape) > 1 and abs(shape[1] - width) == 1:
        raise _ambiguous(key, f"{shape} beside input_ids of [{rows}, {width}]")
    return False


# ---- a list of samples


def _read_list(samples: Sequence[Mapping[str, Any]], spec: MicroBatchSpec) -> Columns:
    if not samples:
        return Columns(BatchForm(kind="list", seqlens=(), width=0, device=torch.device("cpu")), {}, {}, {}, {})
    # All samples must have the same keys.
    # Except for images, which a sample may be without.
    keys_of_images = [key for key in IMAGE_KEYS if any(key in sample for sample in samples)]
    images = {key: [sample.get(key) for sample in samples] for key in keys_of_images}
    if images:
        samples = [{key: value for key, value in sample.items() if key not in IMAGE_KEYS} for sample in samples]
    first = samples[0]
    for i, sample in enumerate(samples):
        if sample.keys() != first.keys():
            raise ValueError(
                f"samples 0 and {i} differ in their keys {sorted(map(str, sample.keys() ^ first.keys()))}: give every "
                "sample the same keys"
            )
    _check_names(first, spec, "sample 0")
    # input_ids define the lengths.
    ids = [_input_ids(sample["input_ids"], 1, "[S_i]", f"input_ids of sample {i}") for i, sample in enumerate(samples)]
    lengths = [len(x) for x in ids]
    if 0 in lengths:
        raise ValueError(
            f"input_ids of sample {lengths.index(0)} is empty: a sequence has at least 1 token; leave the sample out"
        )
    # All other keys, by their kind.
    device = ids[0].device
    tokens: dict[str, Sequence[Tensor]] = {}
    sequences: dict[str, Tensor] = {}
    payloads: dict[str, Sequence[Tensor]] = {}
    for key in first:
        if key == "meta":
            _check_one_meta(samples)
            continue
        column = [_tensor(key, sample[key], device, f" of sample {i}") for i, sample in enumerate(samples)]
        if key in spec.payloads:
            payloads[key] = column
        elif _is_ragged(key, column, lengths, spec):
            tokens[key] = column
        else:
            sequences[key] = torch.stack(column)
    # Samples of a list are unpadded: a mask is redundant, and dropped.
    if "attention_mask" in tokens and not bool((torch.cat(list(tokens.pop("attention_mask"))) == 1).all()):
        raise ValueError(
            "attention_mask of a sample holds zeros: samples of a list are unpadded; leave padding and attention_mask "
            "out"
        )
    form = BatchForm(kind="list", seqlens=tuple(lengths), width=max(lengths), device=device)
    return Columns(form, tokens, sequences, payloads, first.get("meta", {}), images)


def _is_ragged(key: str, column: list[Tensor], lengths: list[int], spec: MicroBatchSpec) -> bool:
    """Return whether a key of a list is per-token. Raise if it is neither per-token nor per-sequence."""
    first = column[0]
    odd = next((i for i, x in enumerate(column) if x.dtype != first.dtype), None)
    if odd is not None:
        raise ValueError(
            f"key {key!r} is {first.dtype} in sample 0 and {column[odd].dtype} in sample {odd}: give it one dtype"
        )
    per_token = all(
        x.dim() > 0 and x.shape[0] == n and x.shape[1:] == first.shape[1:] for x, n in zip(column, lengths, strict=True)
    )
    if key in PER_TOKEN and not per_token:
        bad = next((i for i, (x, n) in enumerate(zip(column, lengths, strict=True)) if x.shape[:1] != (n,)), 0)
        raise ValueError(
            f"key {key!r} of sample {bad} is {list(column[bad].shape)}: it is per-token, so its first dim is the "
            f"sample's length {lengths[bad]}, "
            f"and the rest is the same in every sample"
        )
    if per_token and key not in spec.per_sequence:
        return True
    odd = next((i for i, x in enumerate(column) if x.shape != first.shape), None)
    if odd is not None:
        raise ValueError(
            f"key {key!r} is {list(first.shape)} in sample 0 of {lengths[0]} tokens and {list(column[odd].shape)} in "
            f"sample {odd} of {lengths[odd]}: "
            "neither per-token, [S_i, ...], nor per-sequence, one shape for all; reshape it, or name it in "
            "MicroBatchSpec.payloads"
        )
    # Off by one in every sample: probably shifted targets or log-probs.
    shifted = first.dim() > 0 and all(abs(first.shape[0] - n) == 1 for n in lengths)
    if shifted and key not in spec.per_sequence:
        raise _ambiguous(key, f"{list(first.shape)} in samples of {sorted(set(lengths))} tokens")
    return False


def _check_one_meta(samples: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless ``meta`` is the same in all samples."""
    first = samples[0]["meta"]
    for i, sample in enumerate(samples):
        meta = sample["meta"]
        # Usually one object for all samples, which needs no comparison.
        if meta is first:
            continue
        if (
            not isinstance(meta, Mapping)
            or meta.keys() != first.keys()
            or not all(_equal_plain_values(meta[k], first[k]) for k in first)
        ):
            raise ValueError(
                f"'meta' of sample {i} is not that of sample 0: it goes to every micro-batch as it is, so all samples "
                "share one"
            )


def _equal_plain_values(a: Any, b: Any) -> bool:
    # Only plain values are compared: ``==`` of arrays and tensors is elementwise.
    return a is b or (isinstance(a, str | bytes | int | float | None) and type(a) is type(b) and a == b)


# ---- checks of both forms


def _check_names(batch: Mapping[str, Any], spec: MicroBatchSpec, what: str) -> None:
    for key in batch:
        if not isinstance(key, str):
            raise ValueError(f"{what} has the key {key!r}, a {type(key).__name__}: keys are strings")
        if key in _RESERVED:
            raise ValueError(f"key {key!r} is not allowed in a batch: {_RESERVED[key]}")
        if key not in IMAGE_KEYS and (key.startswith("pixel_") or key in _MEDIA):
            raise ValueError(
                f"key {key!r} is in a batch, but engines train on text alone, and would ignore images, videos and sound: leave it out, and "
                "samples with such inputs, too"
            )
    if "input_ids" not in batch:
        raise ValueError(f"{what} has no 'input_ids', only {sorted(batch)}: add the token ids, int64")
    if not isinstance(batch.get("meta", {}), Mapping):
        raise ValueError(f"key 'meta' is a {type(batch['meta']).__name__}: make it a dict, of whatever is not a tensor")
    # Names in the spec cannot change the kind of a key that is always per-token.
    for option in ("per_sequence", "payloads"):
        wrong = sorted(PER_TOKEN.intersection(getattr(spec, option)))
        if wrong:
            raise ValueError(f"MicroBatchSpec.{option} names {wrong}: these are per-token; leave them out of it")


def _input_ids(value: Any, dim: int, shape: str, name: str = "input_ids") -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}: pass an int64 tensor {shape}")
    if value.dim() != dim:
        other = "a list of samples holds [S_i], a dict [B, S]"
        raise ValueError(f"{name} is {list(value.shape)}, expected {shape}: {other}")
    if value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} is {value.dtype}: token ids are int64 (or int32); convert with .long()")
    return value


def _tensor(key: str, value: Any, device: torch.device, where: str = "") -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"key {key!r}{where} is a {type(value).__name__}, not a tensor: make it one, move it to 'meta' (a dict "
            "that reaches every micro-batch "
            f"as it is), or name a list with one tensor for each sample in MicroBatchSpec.payloads"
        )
    if value.device != device:
        raise ValueError(
            f"key {key!r}{where} is on {value.device} but input_ids on {device}: move the whole batch to one device"
        )
    return value.detach()


def _ambiguous(key: str, shapes: str) -> ValueError:
    return ValueError(
        f"key {key!r} is ambiguous: {shapes} may be per-sequence, or per-token and shifted by one; name it in "
        "MicroBatchSpec.per_sequence, or "
        f"align it with input_ids (what stands at t speaks of the prediction made at t)"
    )
