"""Products of float8 numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from areal.api.sections.quantization import NOT_ROUNDED
from areal.api.sections.strict import StrictConfig

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp"]
"""Names of torchao's recipes."""


class Float8Config(StrictConfig):
    """Float8 training: linear layers of the decoder multiply float8 numbers, in the forward and the backward, by torchao's functions.

    Parameters, gradients and checkpoints keep their precision; embeddings, heads, routers, norms, adapters and vision towers are not
    converted. The operands of the three products of a layer have these scales; `mxfp8` has powers of two for 32 numbers each:

    ====================== ============================== ======================= ==================== ===================
    recipe                 output: inputs x weight        gradient of inputs      gradient of weight   GPU, capability
    ====================== ============================== ======================= ==================== ===================
    ``tensorwise``         one for each tensor            one for each tensor     one for each tensor  8.9
    ``rowwise``            one for each token and output  rows and columns        rows and columns     9.0
    ``rowwise_with_gw_hp`` one for each token and output  rows; the whole weight  in ``dtype``         9.0
    ``mxfp8``              blocks                         blocks                  blocks               10.0
    ``mxfp8_with_gw_hp``   blocks                         blocks                  in ``dtype``         10.0
    ====================== ============================== ======================= ==================== ===================
    """

    recipe: Float8Recipe = Field(
        default="rowwise_with_gw_hp",
        description="With `_with_gw_hp`, gradients do not depend on how the batch was cut.",
    )
    experts: bool = Field(
        default=False,
        description="Also the products of experts: `mxfp8`, `mxfp8_with_gw_hp` and `rowwise`, in bfloat16.",
    )
    emulate: bool = Field(
        default=False, description="Round operands to float8, and multiply in `dtype`: on any device, and slowly."
    )
    exclude: tuple[str, ...] = Field(
        default=NOT_ROUNDED, description="Last components of the names of layers that are not converted."
    )

    @model_validator(mode="after")
    def _experts_have_products(self) -> Float8Config:
        if self.experts and self.recipe in ("tensorwise", "rowwise_with_gw_hp"):
            raise ValueError(
                f"float8.experts = True with recipe = {self.recipe!r}: torchao multiplies experts by 'rowwise', 'mxfp8' and "
                "'mxfp8_with_gw_hp'; choose one of these, or leave experts out"
            )
        if self.experts and self.emulate and self.recipe == "rowwise":
            raise ValueError(
                "float8.experts = True with recipe = 'rowwise' and emulate = True: torchao emulates products of experts for 'mxfp8' alone; "
                "leave experts or emulate out"
            )
        return self
