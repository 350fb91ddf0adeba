"""Low-rank adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from areal.api.sections.strict import StrictConfig


class LoRAConfig(StrictConfig):
    """Low-rank adapters on a frozen model (Hu et al., 2022): a linear layer adds ``scale * B @ A @ x``, where ``A`` is ``[rank, in]`` and
    ``B`` is ``[out, rank]``, initialized to zeros.

    ``scale`` is ``alpha / rank``, or ``alpha / sqrt(rank)`` with ``rslora`` (Kalajdzievski, 2023). There is no dropout.
    """

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0)
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear",
        min_length=1,
        description="Last components of the names of linear layers, a regular expression for full names, or `all-linear` for all but the head.",
    )
    layer_kinds: tuple[Literal["attention", "mlp", "head"], ...] | None = Field(
        default=None,
        min_length=1,
        description="Kinds of layers that `all-linear` selects: `attention`, `mlp` (all other layers of the decoder), `head` (output head).",
    )
    rslora: bool = Field(default=False, description="Scale by the square root of the rank.")

    @model_validator(mode="after")
    def _one_selection(self) -> LoRAConfig:
        if self.layer_kinds is not None and self.target_modules != "all-linear":
            raise ValueError(
                f"lora.layer_kinds = {self.layer_kinds} with lora.target_modules = {self.target_modules!r}: both select layers; leave one "
                "of the two out"
            )
        return self

    @classmethod
    def from_peft(cls, folder: str | Path) -> LoRAConfig:
        """Return the configuration of an adapter that is stored in peft's format.

        Args:
            folder: directory with ``adapter_config.json``.

        Raises:
            ValueError: the file is missing, or does not describe a LoRA adapter.
        """
        file = Path(folder) / "adapter_config.json"
        try:
            written = json.loads(file.read_bytes())
            return cls(
                rank=written["r"],
                alpha=written["lora_alpha"],
                target_modules=written["target_modules"],
                rslora=written.get("use_rslora", False),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not describe a LoRA adapter: {type(error).__name__}: {error}") from error
