"""Mapping between Hugging Face tensors and Megatron-Core parameters: one table for each family, used in both
directions.

A row of a table says how ranks split its tensors, and how the slices of one rank are arranged in the parameter.
Layers and experts have their numbers in the full model. Megatron-Core numbers those of one chunk and of one
expert-parallel rank. A new family is one line in :data:`TABLES`, plus rows for parameters that no other family has.
All code that reads, streams or writes weights uses :func:`local_parameters`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from transformers import PretrainedConfig

from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.utils.dtensor import Box

REPLICATED, ROWS, COLUMNS = None, 0, 1
"""Dimension of a Hugging Face tensor that tensor-parallel ranks split; ``None`` if every rank has the full tensor."""


@dataclass(frozen=True)
class Row:
    """A parameter of Megatron-Core, and the Hugging Face tensors that it consists of.

    Attributes:
        megatron: name of the parameter, with ``{i}`` for a layer and ``{j}`` for an expert.
        hf: names of the tensors.
        split: dimension that ranks split.
        grouped: if True, queries, keys and values alternate by group of heads; otherwise tensors follow each other.
    """

    megatron: str
    hf: tuple[str, ...]
    split: int | None
    grouped: bool = False


_LAYER, _HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."


def _layer_row(megatron: str, hf: str, split: int | None, grouped: bool = False) -> Row:
    return Row(_LAYER + megatron, tuple(_HF_LAYER + name for name in hf.split()), split, grouped)


_ATTENTION = (
    _layer_row("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
    _layer_row("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", REPLICATED),
    _layer_row(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
        ROWS,
        grouped=True,
    ),
    _layer_row(
        "self_attention.linear_qkv.bias",
        "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
        ROWS,
        grouped=True,
    ),
    _layer_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", REPLICATED),
    _layer_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", REPLICATED),
    _layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", COLUMNS),
)
_LATENT_ATTENTION = (
    _layer_row("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
    _layer_row("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", ROWS),
    _layer_row("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", REPLICATED),
    _layer_row("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", REPLICATED),
    _layer_row("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", REPLICATED),
    _layer_row("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", ROWS),
    _layer_row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", REPLICATED),
    _layer_row("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", REPLICATED),
    _layer_row("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", REPLICATED),
    _layer_row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", ROWS),
    _layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", COLUMNS),
)
_FEED_FORWARD = (
    _layer_row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", REPLICATED),
    _layer_row("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", REPLICATED),
    _layer_row("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", ROWS),
    _layer_row("mlp.linear_fc2.weight", "mlp.down_proj.weight", COLUMNS),
)
_EXPERTS = (
    _layer_row("mlp.router.weight", "mlp.gate.weight", REPLICATED),
    _layer_row(
        "mlp.experts.local_experts.{j}.linear_fc1.weight",
        "mlp.experts.{j}.gate_proj.weight mlp.experts.{j}.up_proj.weight",
        ROWS,
    ),
    _layer_row("mlp.experts.local_experts.{j}.linear_fc2.weight", "mlp.experts.{j}.down_proj.weight", COLUMNS),
    _layer_row(
        "mlp.experts.linear_fc1.weight{j}",
        "mlp.experts.{j}.gate_proj.weight mlp.experts.{j}.up_proj.weight",
        ROWS,
    ),
    _layer_row("mlp.experts.linear_fc2.weight{j}", "mlp.experts.{j}.down_proj.weight", COLUMNS),
)
_SHARED_EXPERTS = (
    _layer_row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", REPLICATED),
    _layer_row(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        ROWS,
    ),
    _layer_row("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", COLUMNS),
)
_ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ROWS),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED),
    Row("output_layer.weight", ("lm_head.weight",), ROWS),
    Row("value_head.weight", ("value_head.weight",), REPLICATED),
    Row("value_head.bias", ("value_head.bias",), REPLICATED),
)

TABLES: dict[str, tuple[Row, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (*_ENDS, *_ATTENTION, *_FEED_FORWARD)),
    "qwen3_moe": (*_ENDS, *_ATTENTION, *_FEED_FORWARD, *_EXPERTS),
    "deepseek_v3": (*_ENDS, *_LATENT_ATTENTION, *_FEED_FORWARD, *_EXPERTS, *_SHARED_EXPERTS),
}
"""Rows by ``model_type``, for local layers and for those of Transformer Engine: a model has one kind or the other."""

EMBEDDING = ("model.embed_tokens.weight",)
VOCABULARY = (*EMBEDDING, "lm_head.weight")
"""Tensors whose rows are padded to a multiple of the tensor-parallel size."""


@dataclass(frozen=True)
class MappedRows:
    """Rows of a local parameter, and their position in a Hugging Face tensor.

    Attributes:
        name: name of the tensor.
        shape: full shape of the tensor.
        start: first of the rows in the local parameter.
        box: position in the tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    box: Box


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank, and the slices of Hugging Face tensors that it consists of.

    Attributes:
        name: name in the chunk.
        parameter: local tensor.
        names: names of the Hugging Face tensors, in the order of the table.
        mapped_rows: this rank's rows of these tensors. Rows of the parameter that are in none are padding of a
            vocabulary, and zero.
        tied: True if it repeats the tensor of another parameter.
        order: sort key that orders the parameters of all ranks as in the model.
    """

    name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    mapped_rows: tuple[MappedRows, ...]
    tied: bool
    order: tuple[int, ...]

    def slices(self, flat: Tensor, start: int = 0) -> Iterator[Slice]:
        """Yield the slices of Hugging Face tensors in a tensor with the layout of the parameter, or in a range of it.

        Args:
            flat: ``[n]``, contiguous.
            start: position of its first element in the flattened parameter.
        """
        # A range of a flattened matrix is a few rectangles: partial rows at the ends, full rows between.
        width = math.prod(self.parameter.shape[1:])
        for offset, rows, columns in _rectangles(start, start + len(flat), width):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            values = flat[offset : offset + math.prod(shape)].view(shape)
            for mapped in self.mapped_rows:
                first, last = mapped.start, mapped.start + mapped.box[0].stop - mapped.box[0].start
                low, high = max(rows.start, first), min(rows.stop, last)
                # The rectangle does not overlap with these rows.
                if low >= high:
                    continue
                # Translate the overlap from rows of the parameter to rows and columns of the tensor.
                rows_of_slice = values[low - rows.start : high - rows.start]
                box = [_shift_slice(slice(low, high), mapped.box[0].start - first)]
                if len(mapped.box) == 1:
                    rows_of_slice = rows_of_slice.squeeze(1)
                else:
                    box.append(_shift_slice(columns, mapped.box[1].start))
                yield Slice(mapped.name, tuple(box), rows_of_slice)


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield the full and partial rows in a range of a flattened matrix: offset in the range, rows, columns."""
    at = start
    while at < stop:
        row, column = divmod(at, width)
        # A partial row, at the beginning or the end of the range.
        if column or stop - at < width:
            end = min(stop, (row + 1) * width)
            yield at - start, slice(row, row + 1), slice(column, column + end - at)
        else:
            end = stop - stop % width
            yield at - start, slice(row, end // width), slice(0, width)
        at = end


def _shift_slice(s: slice, by: int) -> slice:
    return slice(s.start + by, s.stop + by)


def local_parameters(chunk: PackedGPT, hf: PretrainedConfig) -> Iterator[LocalParameter]:
    """Yield the parameters of a chunk, in its order.

    Raises:
        ValueError: the table of the family does not have a row for a parameter.
    """
    rows = [(_name_pattern(row.megatron), number, row) for number, row in enumerate(TABLES[hf.model_type])]
    groups = chunk.pg_collection
    for name, parameter in chunk.named_parameters():
        row_match = next(((match, n, row) for pattern, n, row in rows if (match := pattern.fullmatch(name))), None)
        if row_match is None:
            raise ValueError(f"model_type = {hf.model_type!r}: the table of names has no row for {name!r}")
        match, number, row = row_match
        _mark_split(parameter, row.split)
        indices_in_model = _full_model_indices(match.groupdict(), chunk)
        # A tied head is the embedding again, on another stage.
        tied = bool(hf.tie_word_embeddings) and name == "output_layer.weight"
        names = EMBEDDING if tied else tuple(name.format(**indices_in_model) for name in row.hf)
        # Experts may be split over another number of ranks.
        group = groups.expt_tp if "j" in indices_in_model else groups.tp
        mapped_rows = tuple(_mapped_rows(names, row, parameter, group.rank(), group.size(), hf))
        # Sort key: embedding, layers, ends; then layer, expert, and row of the table.
        order = (
            0 if names == EMBEDDING else 1 if "i" in indices_in_model else 2,
            indices_in_model.get("i", 0),
            indices_in_model.get("j", -1),
            number,
        )
        yield LocalParameter(name, parameter, names, mapped_rows, tied, order)


def _mark_split(parameter: nn.Parameter, split: int | None) -> None:
    """Mark whether tensor-parallel ranks split a parameter. The gradient norm counts other parameters on one rank only.

    Marks of the layers are not reliable: Megatron-Core marks only parameters that it initialises, and Transformer
    Engine marks all weights of its linear layers, also replicated ones.
    """
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, name):
            delattr(parameter, name)
    if split is not None:
        set_tensor_model_parallel_attributes(parameter, True, split, 1)


def _mapped_rows(
    names: tuple[str, ...], row: Row, parameter: nn.Parameter, rank: int, size: int, hf: PretrainedConfig
) -> Iterator[MappedRows]:
    # Walk through the rows of the local parameter in order.
    counts, turns = _row_counts(row, parameter.shape[0], size, hf)
    start = 0
    for turn in range(turns):
        for name, count in zip(names, counts, strict=True):
            # Shapes of the slice and of the full tensor, and the position of the slice.
            local = [count * turns, *parameter.shape[1:]]
            full = [n * size if dim == row.split else n for dim, n in enumerate(local)]
            box = [slice(rank * n, (rank + 1) * n) if dim == row.split else slice(0, n) for dim, n in enumerate(local)]
            first = box[0].start + turn * count
            # Padding rows are beyond the end of the Hugging Face tensor: clip the box.
            if name in VOCABULARY:
                full[0] = hf.vocab_size
            box[0] = slice(min(first, full[0]), min(first + count, full[0]))
            yield MappedRows(name, tuple(full), start, tuple(box))
            start += count


def _row_counts(row: Row, rows: int, size: int, hf: PretrainedConfig) -> tuple[list[int], int]:
    """Return the number of consecutive rows of each Hugging Face tensor, and how often the sequence repeats."""
    if not row.grouped:
        return [rows // len(row.hf)] * len(row.hf), 1
    # One repetition per key head: its group of queries, the key, the value.
    heads = hf.num_attention_heads
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    head_dim = rows * size // (heads + 2 * kv_heads)
    return [heads // kv_heads * head_dim, head_dim, head_dim], kv_heads // size


def _full_model_indices(indices: dict[str, str], chunk: PackedGPT) -> dict[str, int]:
    """Return the numbers of layer and expert in the full model."""
    indices_in_model = {}
    if "i" in indices:
        indices_in_model["i"] = chunk.decoder.layers[int(indices["i"])].layer_number - 1
    if "j" in indices:
        groups: ProcessGroupCollection = chunk.pg_collection
        per_rank = chunk.config.num_moe_experts // groups.ep.size()
        indices_in_model["j"] = groups.ep.rank() * per_rank + int(indices["j"])
    return indices_in_model


def _name_pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)")
    return re.compile(text)
