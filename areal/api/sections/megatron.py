"""The section of the Megatron engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from areal.api.sections.backend import NARROW_MOMENTS_OF_ADAPTERS, BackendConfig

if TYPE_CHECKING:
    from areal.api.config import TrainEngineConfig


class MegatronConfig(BackendConfig):
    """Section of the Megatron engine."""

    sequence_parallel: bool = Field(
        default=True,
        description="With `t`, split the tokens over ranks between matrix products; required by experts with `t`.",
    )
    context_parallel: Literal["auto", "ulysses", "gather_kv"] = Field(
        default="auto",
        description="`auto` selects Ulysses if `c` divides a rank's query heads, else gathers keys and values.",
    )
    first_stage_layers: int | None = Field(default=None, gt=0, description="Layers of the first pipeline stage.")
    last_stage_layers: int | None = Field(default=None, gt=0, description="Layers of the last pipeline stage.")
    distributed_optimizer: bool = Field(
        default=True,
        description="Shard optimizer state over data-parallel ranks. float64 and SGD always use the plain optimizer.",
    )
    overlap_grad_reduce: bool = Field(
        default=True, description="Reduce gradients during the last backward of `train_batch`."
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Gather updated parameters during the next forward; requires `distributed_optimizer` and `overlap_grad_reduce`.",
    )
    bucket_size: int | None = Field(
        default=None, gt=0, description="Parameters in a bucket; requires `overlap_grad_reduce`."
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype of the moments; bfloat16 requires Transformer Engine on a GPU."
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = Field(
        default=None,
        description="Float8 products by a recipe of Transformer Engine, on a GPU; None multiplies in `dtype`.",
    )

    @model_validator(mode="after")
    def _overlaps_agree(self) -> MegatronConfig:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather = True needs distributed_optimizer and overlap_grad_reduce, the defaults: leave them out, or this"
            )
        return self

    def check_combination(self, config: TrainEngineConfig) -> None:
        """Refuse options without effect, and options that exclude each other."""
        if self.bucket_size is not None and not self.overlap_grad_reduce:
            raise ValueError(
                f"megatron.bucket_size = {self.bucket_size} without megatron.overlap_grad_reduce = True: gradients are reduced in one "
                "bucket; set it, or leave the size out"
            )
        # Megatron-Core uses its plain optimizer for these, which gathers no parameters.
        kind = config.optimizer and config.optimizer.type
        plain = "optimizer.type = 'sgd'" if kind == "sgd" else "dtype = 'float64'" if config.dtype == "float64" else ""
        if self.overlap_param_gather and plain:
            raise ValueError(
                f"megatron.overlap_param_gather = True with {plain}: it needs the distributed optimizer; leave it out"
            )
        wide = plain or ("" if self.distributed_optimizer else "megatron.distributed_optimizer = False")
        wide = wide or ("optimizer.type = 'muon'" if kind == "muon" else "")
        if self.optimizer_state_dtype == "bfloat16" and wide:
            raise ValueError(
                f"megatron.optimizer_state_dtype = 'bfloat16' with {wide}: it needs AdamW, in the distributed optimizer; leave it out"
            )
        self._check_precision(config)
        wrong = "lora" if config.lora is not None else f"dtype = {config.dtype!r}" if config.dtype != "bfloat16" else ""
        if self.fp8_recipe is not None and wrong:
            raise ValueError(
                f"megatron.fp8_recipe = {self.fp8_recipe!r} with {wrong}: Transformer Engine multiplies float8 numbers of bfloat16 models "
                "without adapters; leave one out"
            )
        if config.lora is None:
            return
        # Adapters have their own optimizer and reduction: Megatron-Core's see no parameter that is trained.
        if self.optimizer_state_dtype == "bfloat16":
            raise ValueError(NARROW_MOMENTS_OF_ADAPTERS)
        for name in ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bucket_size"):
            if (value := getattr(self, name)) != MegatronConfig.model_fields[name].default:
                raise ValueError(
                    f"megatron.{name} = {value} with lora: adapters have an optimizer and a reduction apart; leave it out"
                )

    def _check_precision(self, config: TrainEngineConfig) -> None:
        # Megatron-Core keeps parameters in `dtype`, and for bfloat16 its optimizer keeps float32 copies of them.
        trained = config.optimizer is not None and config.lora is None
        available: list[str] = ["float32"] if config.dtype == "bfloat16" else [config.dtype]
        if config.dtype == "bfloat16" and not trained:
            available.append("bfloat16")
        if config.master_dtype not in available:
            raise ValueError(
                f"master_dtype = {config.master_dtype!r} with dtype = {config.dtype!r}: the Megatron engine keeps parameters in "
                f"{' or '.join(available)} here; set master_dtype={available[0]!r}"
            )
        if config.grad_reduce_dtype not in ("float32", config.dtype):
            raise ValueError(
                f"grad_reduce_dtype = {config.grad_reduce_dtype!r} with dtype = {config.dtype!r}: the Megatron engine reduces in float32 "
                "or dtype; choose one of them"
            )
