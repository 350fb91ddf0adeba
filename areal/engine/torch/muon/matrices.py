"""The weight matrices of a model: which parameters they are, and which parameters are several matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of parameters with the matrices of all experts."""

_COLUMNS: Mapping[str, Callable[[int], tuple[slice, ...]]] = {
    "gpt_oss": lambda n: (slice(0, n, 2), slice(1, n, 2)),
    "aria_text": lambda n: (slice(0, n // 2), slice(n // 2, n)),
    "llama4_text": lambda n: (slice(0, n // 2), slice(n // 2, n)),
}
"""Families whose experts have inputs as rows: the columns of gate and up projections, by model type."""


@dataclass(frozen=True)
class Matrices:
    """How a parameter ``[..., rows, columns]`` consists of matrices.

    Attributes:
        dim: -2 or -1: the dimension that is divided.
        parts: indices of each matrix in that dimension.
    """

    dim: int
    parts: tuple[slice | Tensor, ...]

    def split(self, x: Tensor) -> list[Tensor]:
        """Return the matrices, in new memory or as views."""
        return [x[..., part, :] if self.dim == -2 else x[..., part] for part in self.parts]

    def join(self, matrices: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the parameter of these matrices."""
        out = torch.empty_like(like)
        for part, x in zip(self.parts, matrices, strict=True):
            if self.dim == -2:
                out[..., part, :] = x
            else:
                out[..., part] = x
        return out


WHOLE = Matrices(-2, (slice(None),))
"""A parameter that is one matrix."""


def matrices_of(model: nn.Module, config: PretrainedConfig) -> dict[str, Matrices]:
    """Return the parameters of a model that are matrices, by name.

    These are weights of linear layers and routers, and the stacks of experts; not embeddings, output heads, value heads, kernels of
    convolutions, norms and biases.

    Args:
        model: a model, or a part of it, whose parameters have their full shapes.
        config: of the model.

    Raises:
        ValueError: a parameter consists of several matrices, and their sizes do not fit.
    """
    hf: Any = getattr(model, "hf", model)
    head, modules = hf.get_output_embeddings(), dict(model.named_modules())
    found: dict[str, Matrices] = {}
    for prefix, module in modules.items():
        if isinstance(module, nn.Embedding) or module is head:
            continue
        above, _, own = prefix.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            if parameter.dim() == 3 and name in _STACKS:
                found[full] = _of_stack(full, name, parameter, config.get_text_config())
            elif parameter.dim() == 2 and name == "weight" and not full.startswith("value_head"):
                found[full] = _of_rows(full, parameter, _sizes(own, len(parameter), modules[above], config))
    return found


def _of_stack(full: str, name: str, parameter: Tensor, config: PretrainedConfig) -> Matrices:
    """Return the matrices of a parameter with those of all experts."""
    if name != "gate_up_proj":
        return WHOLE
    if config.model_type in _COLUMNS:
        return Matrices(-1, _COLUMNS[config.model_type](parameter.shape[-1]))
    return _of_rows(full, parameter, (parameter.shape[-2] // 2,) * 2)


def _of_rows(full: str, parameter: Tensor, sizes: Sequence[int] | Matrices | None) -> Matrices:
    """Return matrices that lie one below the other, by their rows.

    Raises:
        ValueError: they are not all rows of the parameter.
    """
    if sizes is None or isinstance(sizes, Matrices):
        return sizes or WHOLE
    if sum(sizes) != parameter.shape[-2]:
        raise ValueError(
            f"optimizer.type = 'muon': {full} has {parameter.shape[-2]} rows, and its matrices would have {list(sizes)}: choose 'adamw'"
        )
    starts = accumulate(sizes, initial=0)
    return Matrices(-2, tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=False)))


def _sizes(own: str, rows: int, above: Any, config: PretrainedConfig) -> tuple[int, ...] | Matrices | None:
    """Return the rows of each matrix of a linear layer, by its name and the attributes of the module that has it; ``None`` for one matrix."""
    if own == "gate_up_proj":
        return (rows // 2,) * 2
    if own == "qkv":
        return (rows // 3,) * 3
    if own == "qkv_proj":
        text = config.get_text_config()
        if not hasattr(text, "num_key_value_heads"):
            raise ValueError(
                f"optimizer.type = 'muon': the order of the projections in qkv_proj of {text.model_type!r} is not known; choose 'adamw'"
            )
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return (text.num_attention_heads * head, *(text.num_key_value_heads * head,) * 2)
    if own == "in_proj_qkv":
        return above.key_dim, above.key_dim, above.value_dim
    if own in ("in_proj_qkvz", "in_proj_ba"):
        # By key head: its query, its key, and the values and gates, or both scalars, of its value heads.
        values = above.num_v_heads // above.num_k_heads
        widths = (above.head_k_dim,) * 2 + (values * above.head_v_dim,) * 2 if own == "in_proj_qkvz" else (values,) * 2
        places = torch.arange(rows).view(above.num_k_heads, -1).split(widths, 1)
        return Matrices(-2, tuple(part.flatten() for part in places))
    if own == "in_proj" and hasattr(above, "n_groups"):
        states = above.n_groups * above.ssm_state_size
        return above.intermediate_size, above.intermediate_size, states, states, above.num_heads
    if own == "in_proj" and hasattr(above, "time_step_rank"):
        return (rows // 2,) * 2
    if own == "x_proj" and hasattr(above, "time_step_rank"):
        return above.time_step_rank, *(above.ssm_state_size,) * 2
    if own == "in_proj" and hasattr(above, "conv"):
        return (rows // 3,) * 3
    return None
