"""Configurations. They refuse unknown fields and check, before any process group exists, all that can be checked then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import ConfigDict, Field, field_validator, model_validator

from areal.api.parallel import ParallelDims
from areal.api.sections.backend import BackendConfig
from areal.api.sections.experts import MoEConfig
from areal.api.sections.fsdp import FSDPConfig
from areal.api.sections.jax import JAXConfig
from areal.api.sections.lora import LoRAConfig
from areal.api.sections.megatron import MegatronConfig
from areal.api.sections.microbatch import MicroBatchSpec
from areal.api.sections.optimizer import OptimizerConfig
from areal.api.sections.strict import StrictConfig, meant
from areal.entry_points import ENGINE_GROUP, registered_names

DType = Literal["bfloat16", "float32", "float64"]
"""Dtypes of an engine. float16 is not supported: its gradients underflow without a loss scaler."""

ActivationCheckpointing = Literal["none", "selective", "full"]
"""Activations that are recomputed in the backward instead of being kept."""

GradSync = Literal["auto", "call", "micro_batch"]
"""Micro-batches on which gradients are reduced: by size, the last one of a call, or each."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name."""
    return getattr(torch, name)


class FinetuneSpec(StrictConfig):
    """Facts about the run that the learning-rate schedule needs."""

    total_train_steps: int | None = Field(
        default=None,
        gt=0,
        description="Optimizer steps of the run; None if it is unknown, for a constant learning rate.",
    )


class TrainEngineConfig(StrictConfig):
    """Configuration of one engine: the model, its layout, its precision and its optimizer.

    An option that differs from its default must be supported by the engine, which is checked when the engine is created.

    Options of one engine are in the section with its name: ``fsdp``, ``megatron``, or for an engine of another package
    ``TrainEngineConfig(backend="mine:d1", mine={...})``. Such a section is validated when the engine is created, because only the engine
    knows its fields. Until then it stays as passed, which may be a mapping or an instance of the engine's ``config_class``.
    """

    # Only for sections of engines of other packages: `_sections_have_engines` refuses all other unknown fields.
    model_config = ConfigDict(extra="allow")

    path: str = Field(min_length=1, description="Model directory or hub name in the Hugging Face format.")
    backend: str = Field(default="fsdp:d1", description="Engine and layout, such as 'fsdp:d4c2'.")
    dtype: DType = Field(default="bfloat16", description="Dtype of the compute.")
    master_dtype: DType = Field(default="float32", description="Dtype of stored parameters and of optimizer state.")
    grad_reduce_dtype: DType = Field(
        default="float32", description="Dtype in which gradients are accumulated and reduced over ranks."
    )
    init_from_scratch: bool = Field(
        default=False, description="Initialize random weights from `seed` instead of loading those at `path`."
    )
    value_head: bool = Field(default=False, description="Add a value head, for the output 'values'.")
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divisor of the logits in every verb; a per-sequence key `temperature` of the batch overrides it.",
    )
    fp32_head: bool = Field(
        default=False,
        description="Keep gradients of logits in float32 where the head multiplies 16-bit operands: on a GPU.",
    )
    kept_logits_mb: int | None = Field(
        default=None,
        ge=0,
        description="MiB of a micro-batch's logits to keep for its backward, which recomputes the rest. None: 1024, or 256 on a CPU.",
    )
    memory_limit_mb: int | None = Field(
        default=None,
        ge=0,
        description="Refuse passes that by measured bytes per token need more MiB of a rank; 0: than are free. None: run all.",
    )
    mb_spec: MicroBatchSpec = MicroBatchSpec()
    optimizer: OptimizerConfig | None = Field(
        default=None, description="None: an engine that only evaluates, such as a reference."
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description="`full` recomputes layers in the backward; `selective` all operations but matrix products, attention and all-to-alls.",
    )
    offload_dir: str | None = Field(
        default=None, description="Directory of files for tensors that `offload` moves; None keeps them in host memory."
    )
    grad_sync: GradSync = Field(
        default="auto",
        description="Reduce gradients on the last micro-batch of a `call`, or on each, which takes less memory. `auto` chooses by size.",
    )
    control_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that a living rank may be late for a call, for example while it generates; None waits without limit.",
    )
    collective_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that one collective on tensors may take; None is torch's default: 10 minutes on NCCL, 30 on gloo.",
    )
    heartbeat_timeout: float = Field(
        default=20.0, ge=2, description="Seconds without a sign of life after which a stopped rank counts as lost."
    )
    deterministic: bool = Field(
        default=False, description="Use only deterministic kernels; slower on a GPU, see docs/precision-and-memory.md."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights and of dropout.")
    lora: LoRAConfig | None = Field(default=None, description="Train adapters and freeze the model.")
    moe: MoEConfig = MoEConfig()
    fsdp: FSDPConfig = FSDPConfig()
    megatron: MegatronConfig = MegatronConfig()
    jax: JAXConfig = JAXConfig()

    @field_validator("backend")
    @classmethod
    def _backend_is_a_layout(cls, value: str) -> str:
        return str(ParallelDims.parse(value))

    @model_validator(mode="after")
    def _sections_have_engines(self) -> TrainEngineConfig:
        for name, section in (self.model_extra or {}).items():
            # The backend's engine may be a class that no package registers. Only names are read here: no engine is imported.
            engines = {self.dims.backend, *registered_names(ENGINE_GROUP)}
            if name not in engines:
                suggestion = meant(name, type(self).model_fields)
                raise ValueError(
                    f"{name} = {section!r}: Extra inputs are not permitted. It is neither a field nor the section of an engine; engines are "
                    f"{', '.join(sorted(engines))}{f'; did you mean {suggestion!r}?' if suggestion else ''}"
                )
            if not isinstance(section, Mapping | BackendConfig):
                raise ValueError(
                    f"{name} = {section!r}: the section of an engine is a mapping, or an instance of its config_class"
                )
        return self

    @model_validator(mode="after")
    def _precisions_agree(self) -> TrainEngineConfig:
        width = {"bfloat16": 0, "float32": 1, "float64": 2}
        for name in ("master_dtype", "grad_reduce_dtype"):
            if width[getattr(self, name)] < width[self.dtype]:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is narrower than dtype = {self.dtype!r}: set {name}={self.dtype!r}, or a narrower dtype"
                )
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> TrainEngineConfig:
        if self.lora is not None and self.value_head:
            raise ValueError(
                "value_head = True with lora: a value head is not part of an adapter, and would stay as it is; leave one of the two out"
            )
        # Factors, and their gradients, are float64 with float64 parameters and float32 otherwise.
        reduced = ("float32", "float64") if self.master_dtype == "float64" else ("float32",)
        if self.lora is not None and self.grad_reduce_dtype not in reduced:
            raise ValueError(
                f"grad_reduce_dtype = {self.grad_reduce_dtype!r} with lora: gradients of adapters are reduced in {reduced[-1]}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _section_agrees(self) -> TrainEngineConfig:
        section = getattr(self, self.dims.backend, None)
        if isinstance(section, BackendConfig):
            section.check_combination(self)
        return self

    @property
    def kept_logits_bytes(self) -> int | None:
        """Return ``kept_logits_mb`` in bytes."""
        return None if self.kept_logits_mb is None else self.kept_logits_mb * 2**20

    @property
    def dims(self) -> ParallelDims:
        """Return the layout that ``backend`` names."""
        return ParallelDims.parse(self.backend)
