"""Configurations. They refuse unknown fields and check, before any process group exists, all that can be checked then."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from areal.api.parallel import ParallelDims

DType = Literal["bfloat16", "float32", "float64"]
"""Dtypes of an engine. float16 is not among them: its gradients underflow without a loss scaler."""


ActivationCheckpointing = Literal["none", "selective", "full"]
"""What is computed again in the backward, instead of being kept."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    return getattr(torch, name)


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class MicroBatchSpec(_Config):
    """How a rank's batch is cut into micro-batches. The gradient does not depend on it.

    With neither ``max_tokens_per_mb`` nor ``n_mbs``, the whole batch of a rank is one micro-batch.

    ``overlong`` says what becomes of a sequence longer than the budget: ``"error"`` raises on every rank, ``"alone"`` gives it
    a micro-batch of its own that exceeds the budget, ``"drop"`` leaves it out (its outputs are zeros, and
    ``StepOutput.metrics["dropped_sequences"]`` counts it).
    """

    max_tokens_per_mb: int | None = Field(
        default=None, gt=0, description="Tokens in a micro-batch, padding and alignment included."
    )
    n_mbs: int | None = Field(
        default=None, gt=0, description="Least number of micro-batches a rank's batch is cut into."
    )
    granularity: int = Field(
        default=1, gt=0, description="Consecutive samples that stay in one micro-batch (2 for preference pairs)."
    )
    overlong: Literal["error", "alone", "drop"] = Field(
        default="error", description="What to do with a sequence above the budget."
    )
    share_prefixes: bool = Field(
        default=False,
        description="Compute tokens at which sequences of a micro-batch begin alike once; the budget counts them once.",
    )
    per_sequence: tuple[str, ...] = Field(
        default=(), description="Keys that hold one row per sequence, whatever their shape suggests."
    )
    payloads: tuple[str, ...] = Field(
        default=(), description="Keys that are lists with one tensor of any size per sample (pixel values)."
    )


class OptimizerConfig(_Config):
    """Optimizer, clipping and learning-rate schedule. Steps are optimizer steps that were taken; skipped ones do not count.

    The learning rate rises linearly over ``warmup_steps`` (step ``i``, from 0, has ``(i + 1) / warmup_steps``), then follows the
    schedule down to ``min_lr_ratio * lr`` at ``FinetuneSpec.total_train_steps``. ``wsd`` (warm-up, stable, decay) holds and falls
    linearly over the last ``decay_ratio`` of all steps.
    """

    type: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-5, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of SGD.")
    gradient_clipping: float | None = Field(
        default=1.0, gt=0, description="Largest global gradient norm; None does not clip."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    decay_ratio: float = Field(default=0.1, gt=0, le=1, description="Share of all steps over which `wsd` falls.")


class FSDPConfig(_Config):
    """Settings of the FSDP engine alone."""

    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free a layer's gathered weights after its forward; False keeps them for the backward; None keeps them in a pipeline.",
    )
    pipeline_schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] | None = (
        Field(default=None, description="Schedule of a pipeline; None takes 1F1B, or Interleaved1F1B with `v`.")
    )
    pipeline_layers: tuple[PositiveInt, ...] | None = Field(
        default=None, description="Layers of each pipeline stage, first to last; None spreads them evenly."
    )
    cpu_offload: bool = Field(
        default=False, description="Keep parameters, gradients and optimizer state in host memory."
    )
    context_parallel: Literal["auto", "ulysses", "gather_kv"] = Field(
        default="auto",
        description="`auto` takes Ulysses where the query heads divide by `c`, else gathers keys and values.",
    )
    checkpointed_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the layers, spread evenly, to which `activation_checkpointing` applies.",
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Dtype of AdamW's moments; bfloat16 takes half the memory, and rounds stochastically.",
    )
    attention: Literal["auto", "packed", "rows"] = Field(
        default="auto",
        description="`packed` runs sequences end to end; `rows` one sequence per row; `auto` packs where that is known to be right.",
    )
    compile: bool = Field(
        default=False, description="Compile each layer with torch.compile, once for micro-batches of every length."
    )
    compile_backend: str = Field(default="inductor", description="Of torch.compile, by name.")

    @field_validator("compile_backend")
    @classmethod
    def _backend_is_known(cls, value: str) -> str:
        if value != "inductor" and value not in (known := torch.compiler.list_backends(exclude_tags=())):
            raise ValueError(f"compile_backend = {value!r}: choose one of {', '.join(known)}")
        return value


class MegatronConfig(_Config):
    """Settings of the Megatron engine alone."""

    sequence_parallel: bool = Field(
        default=True,
        description="With `t`, let ranks share the tokens between matrix products; experts with `t` need it.",
    )
    context_parallel: Literal["auto", "ulysses", "gather_kv"] = Field(
        default="auto",
        description="`auto` takes Ulysses where a rank's query heads divide by `c`, else gathers keys and values.",
    )
    first_stage_layers: int | None = Field(default=None, gt=0, description="Layers of the first pipeline stage.")
    last_stage_layers: int | None = Field(default=None, gt=0, description="Layers of the last pipeline stage.")
    distributed_optimizer: bool = Field(
        default=True,
        description="Shard optimizer state over data-parallel ranks. float64 and SGD have no such optimizer.",
    )
    overlap_grad_reduce: bool = Field(
        default=False, description="Reduce gradients while the last backward of `train_batch` runs."
    )
    overlap_param_gather: bool = Field(
        default=False, description="Gather updated parameters while the next forward runs; needs the two above."
    )
    bucket_size: int | None = Field(
        default=None, gt=0, description="Parameters in a bucket of an overlapped reduction."
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype of the moments; other than float32 needs Transformer Engine on a GPU."
    )

    @model_validator(mode="after")
    def _overlaps_agree(self) -> MegatronConfig:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather = True needs distributed_optimizer = True and overlap_grad_reduce = True: set both, or leave it out"
            )
        return self


class MoEConfig(_Config):
    """Balancing losses of a model with experts, and numbers about its routing.

    Both losses are summed over the layers that have experts, enter ``StepOutput.terms`` and the loss under their names, and are terms like
    any other: ``normalization`` and ``loss_weight`` act on them. They are added by ``train_batch``, ``forward_backward`` and ``eval_batch``.
    ``forward_backward_batch`` with a process function of your own has no denominators to divide by, and leaves them out.
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


class LoRAConfig(_Config):
    """Low-rank adapters on a frozen model (Hu et al., 2022): a linear layer gives ``scale * B @ A @ x`` more, where ``A`` is ``[rank, in]``,
    ``B`` is ``[out, rank]`` and begins as zeros.

    ``scale`` is ``alpha / rank``, or ``alpha / sqrt(rank)`` with ``rslora`` (Kalajdzievski, 2023). Nothing is dropped out.
    """

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0)
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear",
        min_length=1,
        description="Last parts of the names of linear layers, a regular expression for whole names, or `all-linear` for all but the head.",
    )
    rslora: bool = Field(default=False, description="Scale by the root of the rank.")


class FinetuneSpec(_Config):
    """What the learning-rate schedule needs to know of the run."""

    total_train_steps: int = Field(gt=0, description="Optimizer steps of the whole run.")


class TrainEngineConfig(_Config):
    """One engine: the model, its layout, its precision and its optimizer."""

    path: str = Field(min_length=1, description="Model directory or hub name in the Hugging Face format.")
    backend: str = Field(default="fsdp:d1", description="Engine and layout, such as 'fsdp:d4c2'.")
    dtype: DType = Field(default="bfloat16", description="Dtype of the compute.")
    master_dtype: DType = Field(
        default="float32", description="Dtype in which parameters and optimizer state are kept."
    )
    grad_reduce_dtype: DType = Field(default="float32", description="Dtype in which gradients are reduced over ranks.")
    init_from_scratch: bool = Field(default=False, description="Random weights from `seed` instead of those at `path`.")
    value_head: bool = Field(default=False, description="Add a value head, for the output 'values'.")
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divides the logits in every verb; a per-sequence key `temperature` of the batch overrides it.",
    )
    fp32_head: bool = Field(default=False, description="Multiply by the head's weight in float32 whatever `dtype` is.")
    kept_logits_mb: int | None = Field(
        default=None,
        ge=0,
        description="MiB of a micro-batch's logits that may stay for its backward, which makes the others again. None: 1024, or 128 on a CPU.",
    )
    mb_spec: MicroBatchSpec = MicroBatchSpec()
    optimizer: OptimizerConfig | None = Field(
        default=None, description="None: an engine that only evaluates, such as a reference."
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description="`full` recomputes layers in the backward; `selective` all in them but matrix products and attention.",
    )
    offload_dir: str | None = Field(
        default=None, description="Directory of files for what `offload` moves; None keeps it in host memory."
    )
    grad_sync: Literal["call", "micro_batch"] = Field(
        default="call",
        description="Reduce gradients on the last micro-batch of a call, or on each one, which takes less memory. Same values.",
    )
    deterministic: bool = Field(
        default=False, description="Only deterministic kernels; slower on a GPU, see docs/precision-and-memory.md."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights and of dropout.")
    lora: LoRAConfig | None = Field(default=None, description="Train adapters, and keep the model as it is.")
    moe: MoEConfig = MoEConfig()
    fsdp: FSDPConfig = FSDPConfig()
    megatron: MegatronConfig = MegatronConfig()

    @field_validator("backend")
    @classmethod
    def _backend_is_a_layout(cls, value: str) -> str:
        return str(ParallelDims.parse(value))

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
    def _moments_have_an_optimizer(self) -> TrainEngineConfig:
        narrow = self.fsdp.optimizer_state_dtype == "bfloat16"
        if narrow and self.optimizer is not None and (self.optimizer.type != "adamw" or self.master_dtype == "float64"):
            raise ValueError(
                f"fsdp.optimizer_state_dtype = 'bfloat16' with optimizer.type = {self.optimizer.type!r} and master_dtype = "
                f"{self.master_dtype!r}: it is for AdamW on float32 or bfloat16 parameters; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> TrainEngineConfig:
        if self.lora is not None and self.value_head:
            raise ValueError(
                "value_head = True with lora: a value head is not part of an adapter, and would stay as it is; leave one of the two out"
            )
        if self.lora is not None and "bfloat16" in (
            self.fsdp.optimizer_state_dtype,
            self.megatron.optimizer_state_dtype,
        ):
            raise ValueError(
                "optimizer_state_dtype = 'bfloat16' with lora: the moments of adapters are float32; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _graphs_can_be_checkpointed(self) -> TrainEngineConfig:
        if self.fsdp.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "fsdp.compile = True with activation_checkpointing = 'selective', which chooses among operations, and cannot see those in "
                "a compiled graph: choose 'full' or 'none'"
            )
        return self

    @property
    def kept_logits_bytes(self) -> int | None:
        """``kept_logits_mb`` in bytes."""
        return None if self.kept_logits_mb is None else self.kept_logits_mb * 2**20

    @property
    def dims(self) -> ParallelDims:
        """The layout that ``backend`` names."""
        return ParallelDims.parse(self.backend)
