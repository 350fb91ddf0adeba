"""Sections of an engine's configuration that do not depend on the engine: batches, optimizer, experts, adapters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StrictConfig(BaseModel):
    """Base class of all configurations: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_fields(cls, values: Any) -> Any:
        # A configuration that allows other fields knows them itself.
        strict = cls.model_config.get("extra") == "forbid" and isinstance(values, Mapping)
        for name in values if strict else ():
            if name not in cls.model_fields and (known := meant(name, cls.model_fields)):
                raise ValueError(f"{cls.__name__} has no field {name!r}: did you mean {known!r}?")
        return values


_OTHER_NAMES = {
    "learning_rate": "lr",
    "r": "rank",
    "lora_rank": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rslora",
    "model": "path",
    "model_path": "path",
    "model_name_or_path": "path",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler_type": "lr_scheduler",
    "gradient_checkpointing": "activation_checkpointing",
}
"""Names that other libraries give to fields."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant by another one, or ``None``."""
    known = list(known)
    if _OTHER_NAMES.get(name) in known:
        return _OTHER_NAMES[name]
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)


class MicroBatchSpec(StrictConfig):
    """Rules for cutting a rank's batch into micro-batches. The gradient does not depend on them.

    Without ``max_tokens_per_mb``, ``samples_per_mb`` and ``n_mbs``, the batch of a rank is one micro-batch.

    ``overlong`` applies to sequences longer than the budget: ``"error"`` raises on every rank, ``"alone"`` puts each into
    a separate micro-batch that exceeds the budget, ``"drop"`` excludes them (their outputs are zeros, and
    ``StepOutput.metrics["dropped_sequences"]`` counts them).
    """

    max_tokens_per_mb: int | None = Field(
        default=None, gt=0, description="Maximum tokens in a micro-batch, padding and alignment included."
    )
    n_mbs: int | None = Field(default=None, gt=0, description="Minimum number of micro-batches on a rank.")
    samples_per_mb: int | None = Field(
        default=None,
        gt=0,
        description="Consecutive samples of each micro-batch, instead of a budget; the last one has the remaining samples.",
    )
    granularity: int = Field(
        default=1, gt=0, description="Consecutive samples that stay in one micro-batch (2 for preference pairs)."
    )
    overlong: Literal["error", "alone", "drop"] = Field(
        default="error", description="Treatment of sequences above the budget."
    )
    equal_batches: Literal["error", "allow"] = Field(
        default="error",
        description="Treatment of one batch on all data-parallel ranks, in a call with a loss, which would count it several times.",
    )
    share_prefixes: bool = Field(
        default=False,
        description="Compute common prefixes of the sequences of a micro-batch once; the budget counts them once.",
    )
    per_sequence: tuple[str, ...] = Field(
        default=(), description="Keys with one row per sequence, for tensors whose shape suggests otherwise."
    )
    payloads: tuple[str, ...] = Field(
        default=(), description="Keys that are lists with one tensor of any size per sample."
    )

    @model_validator(mode="after")
    def _samples_or_budget(self) -> MicroBatchSpec:
        samples = self.samples_per_mb
        if samples is None:
            return self
        for name in ("max_tokens_per_mb", "n_mbs"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"MicroBatchSpec.samples_per_mb = {samples} with {name} = {getattr(self, name)}: both cut the batch; leave one of them out"
                )
        if samples % self.granularity:
            raise ValueError(
                f"MicroBatchSpec.samples_per_mb = {samples} with granularity = {self.granularity}: choose a multiple of the granularity"
            )
        return self

    def resized(self, **fields: Any) -> MicroBatchSpec:
        """Return the same rules with another size of micro-batches, for the ``mb_spec`` of a call.

        Args:
            fields: values that replace those of these rules. ``max_tokens_per_mb``, ``samples_per_mb`` and ``n_mbs`` are unset without a value.

        Raises:
            ValueError: a value is out of range, or two fields do not fit.
        """
        sizes = {"max_tokens_per_mb", "samples_per_mb", "n_mbs"}
        return MicroBatchSpec(**{**self.model_dump(exclude=sizes), **fields})


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
