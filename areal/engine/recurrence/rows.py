"""Recurrent layers without a function that could be replaced: inside of them, each sequence is a row.

The layer gets the stream as padded rows, and its result is a stream again. Everything between such layers stays packed.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from areal.api.parallel import ParallelDims
from areal.engine.recurrence.chunks import WHOLE_RUNS, ChunkSizes, RunChunks
from areal.engine.recurrence.functions import running_layout

_LAYERS = ("MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock", "RwkvBlock", "xLSTMBlock")
"""Classes of layers that do not see their right padding."""


def run_in_rows(model: PreTrainedModel) -> ChunkSizes | None:
    """Let such layers of a model run one sequence per row while packed sequences run. Can be called again.

    Returns:
        What the layers need of a stream; ``None`` for a model without such layers.
    """
    module = sys.modules[type(model).__module__]
    found = [getattr(module, name) for name in _LAYERS if hasattr(module, name)]
    for layer in found:
        if not hasattr(layer.forward, "in_rows"):
            layer.forward = _in_rows(layer.forward)
    keep_weights(model)
    _take_streams_of_any_length(model)
    return ChunkSizes(WHOLE_RUNS, 0) if found else None


def keep_weights(model: PreTrainedModel) -> None:
    """Let a decoder that divides its weights in place in evaluation mode (RWKV) leave them alone. Can be called again.

    Outputs are the same: it would divide hidden states too, and normalise them last. ``config.rescale_every``, which is saved,
    keeps its value.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "_rescale_layers"):
            module._rescale_layers = _nothing


def _nothing() -> None:
    pass


def _take_streams_of_any_length(model: PreTrainedModel) -> None:
    """Let a decoder that cuts long inputs in evaluation mode (xLSTM) take whole streams, whose sequences its layers need together."""
    module: Any
    for module in model.modules():
        # The configuration of the model itself is saved, and keeps its value.
        if module is not model and hasattr(getattr(module, "config", None), "max_inference_chunksize"):
            module.config = copy.copy(module.config)
            module.config.max_inference_chunksize = sys.maxsize


def check_whole_runs(recurrence: ChunkSizes, dims: ParallelDims, model_type: str) -> None:
    """Raise if the layers of a model run one sequence per row, and its layout splits the stream.

    Raises:
        ValueError: names the layout.
    """
    if recurrence.whole_runs and dims.cp > 1:
        raise ValueError(
            f"{dims} with model_type = {model_type!r}: in its recurrent layers each sequence is a row, and ranks of c have parts of sequences; "
            "leave c out"
        )


def _in_rows(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a layer that takes and returns a packed stream ``[1, T, ...]`` while one runs."""

    @functools.wraps(inner)
    @torch.compiler.disable
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        layout = running_layout()
        if layout is None:
            return inner(self, *args, **options)
        if layout.chunks is None:
            raise ValueError(f"{type(self).__name__}: the layout of packed sequences was made for a model without it")
        chunks: RunChunks = layout.chunks
        stream = (1, len(chunks.places))

        def cut(x: Any) -> Any:
            return chunks.cut(x[0]) if isinstance(x, Tensor) and x.shape[:2] == stream else x

        out = inner(self, *pytree.tree_map(cut, args), **pytree.tree_map(cut, options))
        # Behind the hidden states, layers return states and weights that nobody reads.
        if isinstance(out, Tensor):
            return chunks.join(out)[None]
        return (chunks.join(out[0])[None], *out[1:])

    forward.in_rows = True  # type: ignore[attr-defined]
    return forward
