"""Names of the tensors of a run in a checkpoint that several engines read: weights and optimizer state.

A weight is ``model.hf.NAME``, with its name in transformers, or ``model.value_head.weight``. Optimizer state of a weight is
``optim.hf.NAME.KEY``, with the keys of torch's optimizers: ``exp_avg``, ``exp_avg_sq`` and ``step`` of AdamW, and
``momentum_buffer`` of SGD. State is in the shape and the order of the weight, except the scalar ``step``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from areal.engine.checkpoint.dcp import METADATA, BoxLoadPlanner, TensorBoxes, read_tensors
from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.model.classifier import VALUE_HEAD

MODEL, OPTIM = "model.", "optim."
"""Prefixes of weights and of optimizer state."""

EXCHANGING = frozenset({"fsdp", "jax", "megatron"})
"""Engines that save and load these tensors."""


def weight_key(name: str) -> str:
    """Return the key of a weight, without prefix, by its name in transformers."""
    return name if name in VALUE_HEAD else f"hf.{name}"


def check_weights(path: Path, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint with the weights of a model, without reading values.

    Args:
        path: directory of the checkpoint.
        metadata: metadata of the checkpoint.
        shapes: key, without prefix -> shape of all tensors of the full model.

    Raises:
        ValueError: the checkpoint is of another model; names file and key.
    """
    saved = {
        key.removeprefix(MODEL): value for key, value in metadata.state_dict_metadata.items() if key.startswith(MODEL)
    }
    for key, shape in shapes.items():
        entry = saved.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(
                f"{path / METADATA} has no {key!r}, which the model needs: it is of another model, or of an engine that names "
                "weights of its family otherwise; between those, save with weight_format='hf'"
            )
        if tuple(entry.size) != tuple(shape):
            raise ValueError(
                f"{path / METADATA}: {key!r} has shape {list(entry.size)}, but the model needs {list(shape)}"
            )
    # Tensors that the model does not need are an error, too.
    extra = sorted(set(saved) - set(shapes))
    if extra:
        raise ValueError(f"{path / METADATA} has {extra[0]!r}, which the model has not: it is of another model")


def read_slices(path: Path, metadata: Metadata, key: str, slices: Iterable[Slice]) -> None:
    """Fill slices of tensors, in host memory, that are named as in transformers. Not collective.

    Args:
        path: directory of the checkpoint.
        metadata: metadata of the checkpoint.
        key: key of the tensors in the checkpoint, with ``{}`` for the key of a weight. Slices of others are left as they are.
        slices: slices to fill. Their dtypes may differ from those of the checkpoint.
    """
    by_key: dict[str, list[Slice]] = {}
    for each in slices:
        by_key.setdefault(key.format(weight_key(each.name)), []).append(each)
    saved = metadata.state_dict_metadata
    tensors = {
        full: TensorBoxes([(each.box, each.values) for each in own], tuple(entry.size))
        for full, own in by_key.items()
        if isinstance(entry := saved.get(full), TensorStorageMetadata)
    }
    read_tensors(path, metadata, tensors, BoxLoadPlanner())
