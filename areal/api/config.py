"""Configurations. They refuse unknown fields and check, before any process group exists, all that can be checked then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from areal.api.config_sections import LoRAConfig, MicroBatchSpec, MoEConfig, OptimizerConfig, StrictConfig, meant
from areal.api.parallel import ParallelDims
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


class BackendConfig(StrictConfig):
    """Base class of the section of one engine, which the engine class names in ``config_class``.

    The section has the name of the engine: ``TrainEngineConfig(backend="mine:d1", mine={...})``. This class is the section of an engine
    without options: it accepts no field.
    """

    def check_combination(self, config: TrainEngineConfig) -> None:
        """Check this section against the other fields of the configuration. Called only if ``backend`` names this section's engine.

        Raises:
            ValueError: the engine cannot honour a combination; names both fields and the way out.
        """


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
        # Adapters have float32 moments, replicated over ranks: only the frozen model is sharded by the engine.
        narrow, optimizer = self.optimizer_state_dtype == "bfloat16", config.optimizer
        if narrow and config.lora is not None:
            raise ValueError(_NARROW_MOMENTS_OF_ADAPTERS)
        if narrow and optimizer is not None and (optimizer.type != "adamw" or config.master_dtype == "float64"):
            raise ValueError(
                f"fsdp.optimizer_state_dtype = 'bfloat16' with optimizer.type = {optimizer.type!r} and master_dtype = "
                f"{config.master_dtype!r}: it is for AdamW on float32 or bfloat16 parameters; leave it out"
            )
        if config.grad_sync == "micro_batch" and config.lora is not None:
            raise ValueError(
                "grad_sync = 'micro_batch' with lora: gradients of adapters are reduced once per optimizer step; leave it out"
            )


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
        default=False, description="Reduce gradients during the last backward of `train_batch`."
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

    @model_validator(mode="after")
    def _overlaps_agree(self) -> MegatronConfig:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather = True needs distributed_optimizer = True and overlap_grad_reduce = True: set both, or leave it out"
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
        if config.lora is None:
            return
        # Adapters have their own optimizer and reduction: Megatron-Core's see no parameter that is trained.
        if self.optimizer_state_dtype == "bfloat16":
            raise ValueError(_NARROW_MOMENTS_OF_ADAPTERS)
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


class JAXConfig(BackendConfig):
    """Section of the JAX engine."""

    devices_per_process: int = Field(
        default=1,
        gt=0,
        description="Devices of each process, all of which it uses: ranks of the layout. On CPUs, JAX starts so many of them.",
    )
    coordinator: str | None = Field(
        default=None, description="`host:port` of JAX's coordinator; None takes a free port of the first rank's host."
    )
    compilation_cache: str | None = Field(
        default=None,
        description="Directory in which compiled programs are kept for later starts; None leaves JAX's own setting.",
    )
    attention_kernel: bool = Field(
        default=True,
        description="Compute attention with the kernel of the platform, where it has one for the model; False computes blocks everywhere.",
    )

    def check_combination(self, config: TrainEngineConfig) -> None:
        """Refuse values that the engine does not have."""
        if config.activation_checkpointing == "selective":
            raise ValueError(
                "activation_checkpointing = 'selective': the JAX engine has 'none' and 'full', which recomputes layers"
            )


_NARROW_MOMENTS_OF_ADAPTERS = (
    "optimizer_state_dtype = 'bfloat16' with lora: the moments of adapters are float32; leave it out"
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
        description="MiB of a micro-batch's logits to keep for its backward, which recomputes the rest. None: 1024, or 128 on a CPU.",
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
