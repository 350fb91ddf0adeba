"""Balancing losses and statistics of a model with experts."""

from __future__ import annotations

from pydantic import Field

from areal.api.sections.strict import StrictConfig


class MoEConfig(StrictConfig):
    """Balancing losses of a model with experts, and statistics of its routing.

    Both losses are summed over the layers with experts. They are terms of the loss like any other, under the names in ``StepOutput.terms``:
    ``normalization`` and ``loss_weight`` apply to them. ``train_batch``, ``forward_backward`` and ``eval_batch`` add them.
    ``forward_backward_batch`` with a user's process function does not add them, because it knows no denominators.
    """

    aux_loss: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Coefficient of `moe_aux_loss`, the load-balancing loss of each sequence; divided by the number of sequences.",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Coefficient of `moe_z_loss`, the squared log-sum-exp of each token's router logits; divided by the tokens.",
    )
    statistics: bool = Field(default=False, description="Report the load of the experts, as metrics `moe/...`.")
