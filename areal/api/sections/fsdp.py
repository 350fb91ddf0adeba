"""The section of the FSDP engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, PositiveInt, field_validator

from areal.api.sections.backend import NARROW_MOMENTS_OF_ADAPTERS, BackendConfig
from areal.api.sections.float8 import Float8Config
from areal.api.sections.quantization import QuantizationConfig

if TYPE_CHECKING:
    from areal.api.config import TrainEngineConfig


def _first_given(options: Mapping[str, bool]) -> str | None:
    """Return the name of the first option that is given; ``None`` without any."""
    return next((name for name, given in options.items() if given), None)


class FSDPConfig(BackendConfig):
    """Section of the FSDP engine."""

    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free a layer's gathered weights after its forward; False keeps them for the backward; None keeps them in a pipeline.",
    )
    pipeline_schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] | None = (
        Field(default=None, description="Schedule of a pipeline; None selects 1F1B, or Interleaved1F1B with `v`.")
    )
    pipeline_layers: tuple[PositiveInt, ...] | None = Field(
        default=None, description="Layers of each pipeline stage, first to last; None distributes them evenly."
    )
    cpu_offload: bool = Field(
        default=False, description="Keep parameters, gradients and optimizer state in host memory."
    )
    context_parallel: Literal["auto", "ulysses", "gather_kv"] = Field(
        default="auto",
        description="`auto` selects Ulysses if `c` divides the query heads, else gathers keys and values.",
    )
    checkpointed_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of the layers, evenly spaced, to which `activation_checkpointing` applies.",
    )
    activation_offload: bool = Field(
        default=False,
        description="Keep activations of layers in pinned host memory between forward and backward.",
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Dtype of AdamW's moments; bfloat16 halves their memory and rounds stochastically.",
    )
    attention: Literal["auto", "packed", "rows"] = Field(
        default="auto",
        description="`packed` concatenates sequences; `rows` pads to one sequence per row; `auto` packs if that is known to be correct.",
    )
    text_only: bool = Field(
        default=False, description="Accept a model that also takes images, videos or sound, and train it on text alone."
    )
    freeze_vision: bool = Field(default=False, description="Train nothing of a model's vision tower.")
    layer_kernels: Literal["torch", "liger"] = Field(
        default="torch",
        description="Kernels of norms, SwiGLU and rotary embeddings: torch's, or Liger's, which need CUDA and the extra `liger`.",
    )
    quantization: QuantizationConfig | None = Field(
        default=None, description="Train with the rounding of servers; None does not round."
    )
    float8: Float8Config | None = Field(
        default=None, description="Multiply float8 numbers by torchao, the extra `float8`; None multiplies in `dtype`."
    )
    batch_invariant: bool = Field(
        default=False,
        description="Compute a sequence's log-probs with the same bits in any batch, also in LocalRollout; see docs/batch-invariance.md.",
    )
    compile: bool = Field(default=False, description="Compile each layer with torch.compile, once for all lengths.")
    compile_backend: str = Field(default="inductor", description="Backend of torch.compile, by name.")

    @field_validator("compile_backend")
    @classmethod
    def _backend_is_known(cls, value: str) -> str:
        if value != "inductor" and value not in (known := torch.compiler.list_backends(exclude_tags=())):
            raise ValueError(f"compile_backend = {value!r}: choose one of {', '.join(known)}")
        return value

    def check_combination(self, config: TrainEngineConfig) -> None:
        """Refuse options without effect, and options that exclude each other."""
        if self.compile_backend != "inductor" and not self.compile:
            raise ValueError(
                f"fsdp.compile_backend = {self.compile_backend!r} without fsdp.compile = True: set it, or leave the backend out"
            )
        other = "fsdp.compile = True" if self.compile else "dtype = 'float64'" if config.dtype == "float64" else ""
        if self.layer_kernels != "torch" and other:
            raise ValueError(f"fsdp.layer_kernels = {self.layer_kernels!r} with {other}: leave one of the two out")
        if self.checkpointed_share != 1.0 and config.activation_checkpointing == "none":
            raise ValueError(
                f"fsdp.checkpointed_share = {self.checkpointed_share} with activation_checkpointing = 'none': choose 'full' or "
                "'selective', or leave it out"
            )
        if self.quantization is not None:
            self._check_quantization(config)
        if self.float8 is not None:
            self._check_float8(self.float8, config)
        if self.batch_invariant:
            self._check_invariance(config)
        # Adapters have float32 moments, replicated over ranks: only the frozen model is sharded by the engine.
        narrow, optimizer = self.optimizer_state_dtype == "bfloat16", config.optimizer
        if narrow and config.lora is not None:
            raise ValueError(NARROW_MOMENTS_OF_ADAPTERS)
        if narrow and optimizer is not None and (optimizer.type != "adamw" or config.master_dtype == "float64"):
            raise ValueError(
                f"fsdp.optimizer_state_dtype = 'bfloat16' with optimizer.type = {optimizer.type!r} and master_dtype = "
                f"{config.master_dtype!r}: it is for AdamW on float32 or bfloat16 parameters; leave it out"
            )
        if config.grad_sync == "micro_batch" and config.lora is not None:
            raise ValueError(
                "grad_sync = 'micro_batch' with lora: gradients of adapters are reduced once per optimizer step; leave it out"
            )

    def _check_quantization(self, config: TrainEngineConfig) -> None:
        # Scales would be those of a shard of a weight, and graphs of compiled layers do not see the rounding of inputs.
        other = f"backend = {config.backend!r}" if config.dims.tp > 1 else "fsdp.compile = True" if self.compile else ""
        if other:
            raise ValueError(
                f"fsdp.quantization with {other}: rounding needs whole weights in eager layers; leave one out"
            )

    def _check_float8(self, float8: Float8Config, config: TrainEngineConfig) -> None:
        others = {
            f"backend = {config.backend!r}": config.dims.tp > 1,
            "fsdp.quantization": self.quantization is not None,
            "dtype = 'float64'": config.dtype == "float64"
            and (float8.recipe.startswith("mxfp8") or not float8.emulate),
            f"float8.experts = True and dtype = {config.dtype!r}": float8.experts and config.dtype != "bfloat16",
        }
        refused = _first_given(others)
        if refused is not None:
            raise ValueError(
                f"fsdp.float8 with {refused}: its products are of whole weights in bfloat16 or float32, of experts in bfloat16; leave one out"
            )

    def _check_invariance(self, config: TrainEngineConfig) -> None:
        """Refuse what computes a row in another way than the rules of batch invariance."""
        dims = config.dims
        split = "".join(
            x for x, n in zip("ctpve", (dims.cp, dims.tp, dims.pp, dims.vpp, dims.ep), strict=True) if n > 1
        )
        if split:
            raise ValueError(
                f"fsdp.batch_invariant = True with backend = {config.backend!r}: {split} split a sequence over ranks; use d and r alone"
            )
        others = {
            "fsdp.compile = True": self.compile,
            f"fsdp.layer_kernels = {self.layer_kernels!r}": self.layer_kernels != "torch",
            f"fsdp.attention = {self.attention!r}": self.attention == "rows",
            "fp32_head = True": config.fp32_head,
            "fsdp.quantization": self.quantization is not None,
            "fsdp.float8": self.float8 is not None,
            "fsdp.activation_offload = True": self.activation_offload,
        }
        refused = _first_given(others)
        if refused is not None:
            raise ValueError(f"fsdp.batch_invariant = True with {refused}: leave one of the two out")
