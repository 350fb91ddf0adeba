"""Training with the rounding of inference servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from areal.api.sections.strict import StrictConfig

NOT_ROUNDED = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
"""Last components of the names of routers, and of small projections of recurrent layers."""


class QuantizationConfig(StrictConfig):
    """Quantization-aware training: linear layers of the decoder and experts compute with weights and inputs that are rounded as servers do.

    The backward takes rounding as the identity. Parameters, gradients and checkpoints keep their precision; embeddings, heads, routers,
    norms and vision towers do not round.

    =============== ==================================================== ==========================================
    format          weights                                              inputs
    =============== ==================================================== ==========================================
    ``fp8``         float8 e4m3, a scale for each output                 float8 e4m3, a scale for each token
    ``fp8_blocks``  float8 e4m3, a scale for 128 x 128                   float8 e4m3, a scale for 128 inputs
    ``int4``        integers -8 to 7, a scale for ``group_size`` inputs  not rounded
    ``nvfp4``       float4 e2m1, a float8 scale for 16 inputs            not rounded
    =============== ==================================================== ==========================================
    """

    format: Literal["fp8", "fp8_blocks", "int4", "nvfp4"] = Field(
        default="fp8", description="Format of the servers that generate."
    )
    group_size: int = Field(default=128, gt=0, description="Inputs of a group with one scale, of `int4`.")
    exclude: tuple[str, ...] = Field(
        default=NOT_ROUNDED, description="Last components of the names of layers that do not round."
    )

    @model_validator(mode="after")
    def _size_applies(self) -> QuantizationConfig:
        default = QuantizationConfig.model_fields["group_size"].default
        if self.format != "int4" and self.group_size != default:
            raise ValueError(
                f"quantization.group_size = {self.group_size} with format = {self.format!r}: it is for 'int4'; leave it out"
            )
        return self
