"""Formats in which servers keep weights, in the words of :class:`~areal.api.sections.quantization.QuantizationConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.api.sections.quantization import QuantizationConfig

_NAMES = {
    "fp8_per_channel": "fp8",  # vLLM
    "w8a8_fp8": "fp8",  # SGLang
    "fp8_per_block": "fp8_blocks",
    "unquant": "",  # SGLang
}
"""Servers' names of formats that they make of 16-bit weights."""


def served_format(method: str | None, files: Mapping[str, Any] | None) -> str | None:
    """Return the format of a server's weights and inputs of linear layers.

    Args:
        method: name of its quantization, ``""`` for none; ``None`` if it does not tell.
        files: ``quantization_config`` of the model's ``config.json``; ``None`` without one, or if it cannot be read.

    Returns:
        ``""`` if it does not round, a format of :class:`~areal.api.sections.quantization.QuantizationConfig` (``int4`` with its group, as
        ``"int4, groups of 128"``), or the server's own name of another format; ``None`` if it is unknown.
    """
    if not method and files is None:
        return method
    method = method or str(files and files.get("quant_method"))
    if method == "compressed-tensors" and files is not None:
        return _of_groups(files) or method
    if files is not None:
        blocks = list(files.get("weight_block_size") or ())
        if blocks:
            return "fp8_blocks" if blocks == [128, 128] else f"fp8, blocks of {blocks}"
        if method == "fp8":
            # Without blocks, files have one scale for each matrix.
            return "fp8_per_tensor"
    return _NAMES.get(method, method)


def _of_groups(files: Mapping[str, Any]) -> str | None:
    """Return the format of files of compressed-tensors; ``None`` for others than ours."""
    schemes = list((files.get("config_groups") or {}).values())
    if len(schemes) != 1:
        return None
    weights, inputs = schemes[0].get("weights") or {}, schemes[0].get("input_activations")
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), bool(weights.get("symmetric", True)))
    dynamic = None if inputs is None else (inputs.get("num_bits"), inputs.get("strategy"), inputs.get("dynamic"))
    if kind == ("float", 8, "channel", True) and dynamic == (8, "token", True):
        return "fp8"
    if kind == ("float", 8, "block", True) and list(weights.get("block_structure") or ()) == [128, 128]:
        return "fp8_blocks"
    if kind == ("int", 4, "group", True) and inputs is None:
        return f"int4, groups of {weights.get('group_size')}"
    return "nvfp4" if kind == ("float", 4, "tensor_group", True) and inputs is None else None


def trained_format(quantization: QuantizationConfig | None) -> str:
    """Return the format that a trainer rounds to, as :func:`served_format`."""
    if quantization is None:
        return ""
    form = quantization.format
    return f"int4, groups of {quantization.group_size}" if form == "int4" else form
