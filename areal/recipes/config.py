"""Settings of a run: what a file and the command line say. Everything that can be checked without a model is checked here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from areal.api import FinetuneSpec, LoRAConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.sections.strict import StrictConfig
from areal.utils.platform import fast_dtype

TrackerName = Literal["console", "jsonl", "curves", "tensorboard", "wandb", "mlflow"]
_ENGINE_FIELDS = {
    "path": "model",
    "backend": "backend",
    "dtype": "dtype",
    "seed": "seed",
    "mb_spec": "max_tokens_per_mb",
    "optimizer": "lr",
    "lora": "lora_rank",
    "value_head": "the recipe",
}
_OPTIMIZER_FIELDS = {name: name for name in ("lr", "lr_scheduler", "warmup_steps")}
"""Fields of an engine, and of an optimizer, that a run sets itself, each with the setting that does."""


def toml_value(text: str) -> Any:
    """Return a value in TOML's form; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the values of both; tables are merged, other values of the second replace those of the first."""
    values = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = merged(values[key], value) if both else value
    return values


class RunConfig(StrictConfig):
    """Settings that all recipes have."""

    model: str = Field(min_length=1, description="Model directory or hub name in the Hugging Face format.")
    dataset: str | None = Field(
        default=None,
        description="JSONL, JSON or Parquet file, a directory of `datasets`, or `module:function` that returns rows. None: rows are passed.",
    )
    evaluation: str | None = Field(
        default=None, description="Rows for evaluation, in the same forms; None takes `held_out` rows."
    )
    held_out: int = Field(default=0, ge=0, description="Rows of `dataset` that are evaluated on instead of trained on.")
    columns: dict[str, str] = Field(
        default={}, description="Names of the data's columns, by the names that the recipe reads."
    )
    system: str = Field(default="", description="System message before each row that has none; empty for none.")
    chat_template: str | None = Field(
        default=None, description="File of a chat template (Jinja); None takes the tokenizer's."
    )
    template_options: dict[str, Any] = Field(
        default={}, description="Variables of the chat template, such as `enable_thinking`."
    )
    text: bool = Field(
        default=False, description="Join the contents of messages as plain text, without a template: for base models."
    )
    tools: tuple[str, ...] = Field(
        default=(),
        description="Functions, as `module:function`, that prompts describe, and that a policy may call.",
    )
    output: Path = Field(default=Path("runs/run"), description="Directory of the run.")
    resume: bool = Field(default=False, description="Continue from the newest checkpoint in `output`, if there is one.")

    backend: str = Field(default="fsdp:d1", description="Engine and layout, such as 'fsdp:d4c2'.")
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        default="auto", description="Dtype of the compute; auto selects the machine's fastest."
    )
    seed: int = Field(default=0, description="Seed of the order of rows, of answers, and of random weights.")
    max_tokens_per_mb: int = Field(
        default=4096, gt=0, description="Maximum tokens in a packed micro-batch. A longer sample has one of its own."
    )
    lora_rank: int = Field(
        default=0, ge=0, description="Rank of adapters on all linear layers; 0 trains the model itself."
    )
    engine: dict[str, Any] = Field(
        default={}, description="Further fields of TrainEngineConfig, such as `activation_checkpointing`."
    )
    workers: Literal["ranks", "ray"] = Field(
        default="ranks", description="Processes of the engine: the ranks of `torchrun`, or actors of Ray."
    )
    ray: dict[str, Any] = Field(default={}, description="Options of RayWorkers, such as `resources`.")
    max_losses: int = Field(
        default=0,
        ge=0,
        description="Losses of an actor or a node of Ray after which the run still goes on, from the newest checkpoint.",
    )

    steps: int | None = Field(default=None, gt=0, description="Batches to train on; None: `epochs`.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the data set, instead of `steps`.")
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant", description="Schedule of the learning rate."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps over which the learning rate rises.")
    optimizer: dict[str, Any] = Field(
        default={}, description="Further fields of OptimizerConfig, such as `weight_decay`."
    )

    eval_every: int | None = Field(
        default=None, gt=0, description="Batches between evaluations; None: before the first and after the last."
    )
    patience: int | None = Field(
        default=None, gt=0, description="Evaluations without a better result, after which the run ends."
    )
    keep_best: bool = Field(
        default=False, description="Write the model with the best evaluation to `output/best`, as it is found."
    )
    checkpoint_every: int = Field(default=0, ge=0, description="Batches between checkpoints; 0 writes none.")
    keep_checkpoints: int = Field(default=1, gt=0, description="Number of checkpoints that are kept.")
    save_model: bool = Field(default=True, description="Write the trained model to `output/model`.")
    trackers: tuple[TrackerName, ...] = Field(
        default=("console", "jsonl", "curves"), description="Where the numbers of each step go."
    )
    profile: Path | None = Field(
        default=None,
        description="Directory for a profile of the second step: a trace and a memory timeline of each rank.",
    )
    wandb: dict[str, Any] = Field(default={}, description="Options of the W&B tracker, such as `project`.")
    mlflow: dict[str, Any] = Field(default={}, description="Options of the MLflow tracker, such as `experiment`.")

    @field_validator("engine", "optimizer")
    @classmethod
    def _tables_have_own_fields(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known = _ENGINE_FIELDS if info.field_name == "engine" else _OPTIMIZER_FIELDS
        for name in value:
            if name in known:
                raise ValueError(f"{info.field_name}.{name} is set by {known[name]}: leave it out here")
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> RunConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps = {self.steps} with epochs = {self.epochs}: both say how long to train; leave one of them out"
            )
        if self.evaluation is not None and self.held_out:
            raise ValueError(
                f"held_out = {self.held_out} with evaluation = {self.evaluation!r}: both are evaluated on; leave one of them out"
            )
        if self.text and self.chat_template is not None:
            raise ValueError(
                f"text = True with chat_template = {self.chat_template!r}: plain text has no template; leave one of them out"
            )
        if self.text and self.tools:
            raise ValueError("text = True with tools: calls need a chat template; leave one of them out")
        if self.patience is not None and self.eval_every is None:
            raise ValueError(
                f"patience = {self.patience} without eval_every: it counts evaluations during training; set both, or leave it out"
            )
        if self.ray and self.workers != "ray":
            raise ValueError(f"ray = {self.ray} without workers = 'ray': set it, or leave the options out")
        if self.max_losses and not (self.workers == "ray" and self.checkpoint_every):
            raise ValueError(
                f"max_losses = {self.max_losses} with workers = {self.workers!r}, checkpoint_every = {self.checkpoint_every}: a run goes on "
                "in new actors of Ray from a checkpoint: set both, or leave it out"
            )
        for name in ("wandb", "mlflow"):
            if getattr(self, name) and name not in self.trackers:
                raise ValueError(
                    f"{name} = {getattr(self, name)} without {name!r} among trackers = {list(self.trackers)}: add it, or leave it out"
                )
        self.engine_config()
        return self

    @property
    def compute_dtype(self) -> Literal["bfloat16", "float32", "float64"]:
        """``dtype`` with ``"auto"`` resolved for this machine."""
        return fast_dtype() if self.dtype == "auto" else self.dtype

    def engine_config(self, **changes: Any) -> TrainEngineConfig:
        """Return the configuration of an engine.

        Args:
            changes: fields that differ for this engine, such as ``optimizer=None`` for a reference.

        Raises:
            ValueError: a field is unknown or out of range.
        """
        fields: dict[str, Any] = {
            "path": self.model,
            "backend": self.backend,
            "dtype": self.compute_dtype,
            "seed": self.seed,
            "mb_spec": self.micro_batches(),
            "optimizer": self.optimizer_config(),
            "lora": LoRAConfig(rank=self.lora_rank, alpha=2.0 * self.lora_rank) if self.lora_rank else None,
        }
        if fields["dtype"] == "float64":
            fields |= {"master_dtype": "float64", "grad_reduce_dtype": "float64"}
        return TrainEngineConfig(**{**fields, **self.engine, **changes})

    def optimizer_config(self, **changes: Any) -> OptimizerConfig:
        """Return the configuration of the optimizer."""
        fields = {"lr": self.lr, "lr_scheduler": self.lr_scheduler, "warmup_steps": self.warmup_steps}
        return OptimizerConfig(**{**fields, **self.optimizer, **changes})

    def micro_batches(self) -> MicroBatchSpec:
        """Return the rules of micro-batches."""
        return MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, overlong="alone")

    def steps_of(self, per_epoch: float) -> int:
        """Return the number of batches to train on.

        Args:
            per_epoch: number of batches in a pass over the data set.
        """
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 1.0) * per_epoch))

    def spec(self, optimizer_steps: int) -> FinetuneSpec:
        """Return what the learning-rate schedule needs."""
        return FinetuneSpec(total_train_steps=optimizer_steps)


class FixedDataConfig(RunConfig):
    """Settings that recipes on a fixed data set have."""

    batch_size: int = Field(default=32, gt=0, description="Rows in a batch, over all ranks.")
    shuffle: bool = Field(default=True, description="Draw a new order of the rows in each epoch.")
    max_length: int | None = Field(
        default=None,
        gt=0,
        description="Longest sequence of a row in tokens; longer ones are refused. None: the model's context.",
    )


class SFTConfig(FixedDataConfig):
    """Settings of supervised fine-tuning."""

    output: Path = Field(default=Path("runs/sft"), description="Directory of the run.")
    train: Literal["all", "last"] = Field(
        default="all", description="Answers that are trained on: those of all turns, or the last one."
    )


class PreferenceConfig(FixedDataConfig):
    """Settings that recipes on pairs have."""

    batch_size: int = Field(default=16, gt=0, description="Pairs in a batch, over all ranks.")

    def micro_batches(self) -> MicroBatchSpec:
        """Return rules that keep both answers of a pair together, and compute their prompt once."""
        return MicroBatchSpec(
            max_tokens_per_mb=self.max_tokens_per_mb, overlong="alone", granularity=2, share_prefixes=True
        )


class DPOConfig(PreferenceConfig):
    """Settings of direct preference optimisation."""

    output: Path = Field(default=Path("runs/dpo"), description="Directory of the run.")
    lr: float = Field(default=1e-6, gt=0, description="Peak learning rate of AdamW.")
    beta: float = Field(default=0.1, gt=0, description="Weight of the distance to the reference.")


class RewardModelConfig(PreferenceConfig):
    """Settings of a reward model."""

    output: Path = Field(default=Path("runs/reward_model"), description="Directory of the run.")
    center_coef: float = Field(default=0.0, ge=0, description="Weight of the term that keeps rewards near 0.")
