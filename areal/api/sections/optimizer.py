"""The optimizer, its clipping and its learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from areal.api.sections.strict import StrictConfig


class MuonConfig(StrictConfig):
    """Muon: updates of weight matrices with orthogonalised momentum (Jordan et al., 2024). AdamW updates the other parameters."""

    momentum: float = Field(default=0.95, gt=0, lt=1)
    nesterov: bool = True
    steps: int = Field(default=5, ge=1, description="Steps of the Newton-Schulz iteration.")
    dtype: Literal["bfloat16", "float32", "float64"] = Field(
        default="bfloat16", description="Of the iteration: `bfloat16` is 1.5e-2 from exact arithmetic."
    )
    scale: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw", description="Size of updates: that of AdamW's, or sqrt(max(1, rows / columns))."
    )


class OptimizerConfig(StrictConfig):
    """Optimizer, clipping and learning-rate schedule. Skipped optimizer steps do not count as steps.

    A caller with a schedule of its own leaves ``lr_scheduler`` and ``warmup_steps`` out, and calls ``TrainEngine.set_lr`` before each step.

    The learning rate rises linearly over ``warmup_steps`` (step ``i``, from 0, has ``(i + 1) / warmup_steps``), then follows the
    schedule down to ``min_lr_ratio * lr`` at ``FinetuneSpec.total_train_steps``. ``wsd`` (warm-up, stable, decay) is constant, then
    decays linearly over the last ``decay_ratio`` of all steps.
    """

    type: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = Field(default=1e-5, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1, description="First beta of AdamW.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Second beta of AdamW.")
    eps: float = Field(default=1e-8, gt=0, description="Epsilon of AdamW.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of SGD.")
    muon: MuonConfig = MuonConfig()
    gradient_clipping: float | None = Field(
        default=1.0, gt=0, description="Largest global gradient norm; None does not clip."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Final learning rate over `lr`; not of `constant`."
    )
    decay_ratio: float = Field(default=0.1, gt=0, le=1, description="Fraction of all steps over which `wsd` decays.")

    @model_validator(mode="after")
    def _settings_apply(self) -> OptimizerConfig:
        # Refuse settings of the other optimizer and of other schedules: they would be ignored.
        unused = {
            f"optimizer.type = {self.type!r}": (
                *(() if self.type == "muon" else ("muon",)),
                *(("beta1", "beta2", "eps") if self.type == "sgd" else ("momentum",)),
            ),
            f"optimizer.lr_scheduler = {self.lr_scheduler!r}": (
                *(("min_lr_ratio",) if self.lr_scheduler == "constant" else ()),
                *(("decay_ratio",) if self.lr_scheduler != "wsd" else ()),
            ),
        }
        for choice, names in unused.items():
            for name in names:
                if getattr(self, name) != OptimizerConfig.model_fields[name].default:
                    raise ValueError(
                        f"optimizer.{name} = {getattr(self, name)} with {choice}: it would have no effect; leave it out"
                    )
        return self
