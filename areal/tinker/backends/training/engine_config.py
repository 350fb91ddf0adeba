"""Settings of a backend on an engine."""

from __future__ import annotations

import importlib
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from areal.api import FSDPConfig, LoRAConfig, MegatronConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.config import ActivationCheckpointing, DType
from areal.api.sections.jax import JAXConfig
from areal.api.sections.strict import StrictConfig
from areal.dispatch import Executor, InProcess
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdapterSpec

_KINDS: tuple[Literal["attention", "mlp", "head"], ...] = ("attention", "mlp", "head")


class RayConfig(StrictConfig):
    """Processes of the ranks in Ray; see :class:`areal.dispatch.ray.RayWorkers`."""

    resources: dict[str, float] = Field(
        default={"CPU": 1.0}, min_length=1, description="Resources of one process, such as `{'GPU': 1}`."
    )
    processes_per_bundle: int = Field(default=1, gt=0, description="Processes of one bundle, which are on one node.")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="Strategy of the placement group."
    )
    start_seconds: float = Field(
        default=120.0, gt=0, description="Limit of the wait for resources and for the processes."
    )
    hang_seconds: float = Field(
        default=600.0, gt=0, description="Seconds without progress after which a rank counts as lost."
    )
    grace_seconds: float = Field(default=30.0, gt=0, description="The same once another rank has reported an error.")
    max_result_bytes: int = Field(default=4 * 2**30, gt=0, description="Bytes of one rank's result, at most.")
    address: str | None = Field(default=None, description="Host name or address of the process of rank 0.")
    port: int | None = Field(default=None, gt=0, lt=2**16, description="Port of the rendezvous; None for a free one.")
    environment: dict[str, str] = Field(default={}, description="Environment variables of the processes.")


class EngineBackendConfig(StrictConfig):
    """Settings of :class:`~areal.tinker.backends.training.engine_backend.EngineBackend`: the content of ``--backend-config``.

    Fields that the engine has, too, are described by :class:`areal.api.TrainEngineConfig`.
    """

    dtype: DType | None = Field(
        default=None, description="Dtype of the compute and of the base model. None: that of the model's files."
    )
    fp32_head: bool = Field(default=False, description="Multiply by the head's weight in float32 for every `dtype`.")
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="Numerator of the scale of an adapter, `alpha / rank`, if its client gives none.",
    )
    max_rank: int = Field(default=128, gt=0, description="Largest rank of an adapter.")
    max_models: int | None = Field(default=None, gt=0, description="Largest number of models at the same time.")
    adapter_memory_mb: int | None = Field(
        default=None,
        gt=0,
        description="MiB on each rank for adapters, their gradients and optimizer state. None: the free memory of the device.",
    )
    max_tokens: int | None = Field(
        default=None, gt=0, description="Most tokens of one sample. None: the context length of the model."
    )
    max_tokens_per_mb: int = Field(
        default=8192, gt=0, description="Most tokens of a micro-batch. A longer sample is a micro-batch by itself."
    )
    max_shared_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Most tokens of a request that shares a call of the engine with those of other models; 0: none does. None: 200 where "
        "results are the same bits (one CPU thread, float32, widths that are multiples of 32), and 0 elsewhere, where they differ by rounding.",
    )
    kept_logits_mb: int | None = Field(default=None, ge=0, description="MiB of logits kept for the backward.")
    activation_checkpointing: ActivationCheckpointing = "none"
    deterministic: bool = Field(default=False, description="Use only deterministic kernels.")
    seed: int = Field(default=0, ge=0, description="Seed from which those of models without a seed are derived.")
    control_timeout: float | None = Field(default=None, gt=0, description="Seconds that a rank may be late for a call.")
    collective_timeout: float | None = Field(default=None, gt=0, description="Seconds that a collective may take.")
    heartbeat_timeout: float = Field(default=20.0, ge=2, description="Seconds after which a stopped rank is lost.")
    fsdp: FSDPConfig = FSDPConfig()
    megatron: MegatronConfig = MegatronConfig()
    jax: JAXConfig = JAXConfig()
    ray: RayConfig | None = Field(
        default=None,
        description="Processes in Ray; the default with several ranks. One rank runs in the server without it.",
    )

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> EngineBackendConfig:
        """Validate the content of ``--backend-config``.

        Raises:
            ValueError: names each setting that is unknown, with the known ones, or out of range.
        """
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise ValueError("; ".join(_texts(cls, error))) from None

    def engine_config(self, model: str, backend: str, dtype: DType) -> TrainEngineConfig:
        """Return the configuration of the engine for one base model on one layout.

        The engine's first adapter is as small as possible: it is never trained.

        Args:
            model: directory or hub name.
            backend: layout.
            dtype: dtype if the settings name none.
        """
        dtype = self.dtype or dtype
        return TrainEngineConfig(
            path=model,
            backend=backend,
            dtype=dtype,
            # The model is not trained, so that a wider copy would be of no use.
            master_dtype=dtype,
            grad_reduce_dtype="float64" if dtype == "float64" else "float32",
            fp32_head=self.fp32_head,
            kept_logits_mb=self.kept_logits_mb,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, overlong="alone"),
            # Each step has its own settings: these values are never used.
            optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0, gradient_clipping=None),
            activation_checkpointing=self.activation_checkpointing,
            control_timeout=self.control_timeout,
            collective_timeout=self.collective_timeout,
            heartbeat_timeout=self.heartbeat_timeout,
            deterministic=self.deterministic,
            seed=self.seed,
            lora=LoRAConfig(rank=1, alpha=self.alpha),
            fsdp=self.fsdp,
            megatron=self.megatron,
            jax=self.jax,
        )

    def lora(self, adapter: AdapterSpec) -> LoRAConfig:
        """Return the engine's description of an adapter.

        Raises:
            UserError: the rank or alpha is out of range, or no kind of layer is selected.
        """
        if not 1 <= adapter.rank <= self.max_rank:
            raise UserError(f"lora_config.rank = {adapter.rank}: choose a rank from 1 to {self.max_rank}")
        alpha = self.alpha if adapter.alpha is None else adapter.alpha
        if not 0 < alpha < math.inf:
            raise UserError(f"lora_config.alpha = {alpha}: it must be a finite number above 0")
        kinds = tuple(kind for kind in _KINDS if getattr(adapter, kind))
        if not kinds:
            raise UserError("lora_config: set at least one of train_attn, train_mlp and train_unembed")
        return LoRAConfig(rank=adapter.rank, alpha=alpha, layer_kinds=kinds)

    def executor(self, ranks: int) -> Executor:
        """Return the processes of the ranks: this one, or those of Ray.

        Raises:
            ValueError: Ray is needed and not installed.
        """
        if ranks == 1 and self.ray is None:
            return InProcess()
        try:
            workers = importlib.import_module("areal.dispatch.ray").RayWorkers
        except ImportError as error:
            raise ValueError(
                f"{ranks} ranks run in Ray, which is not installed ({error}): install areal[ray]"
            ) from error
        return workers(ranks, **({} if self.ray is None else self.ray.model_dump()))


def _texts(cls: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """Return a text for each error, with the path of the setting."""
    for detail in error.errors():
        path = ".".join(str(part) for part in ("backend_config", *detail["loc"]))
        if detail["type"] == "extra_forbidden":
            known = ", ".join(sorted(_section(cls, detail["loc"][:-1]).model_fields))
            yield f"{path} = {detail['input']!r}: there is no such setting; known are {known}"
        else:
            yield f"{path} = {detail['input']!r}: {detail['msg']}"


def _section(cls: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the class of the section at a path of settings."""
    for name in path:
        kinds = typing.get_args(cls.model_fields[str(name)].annotation) or (cls.model_fields[str(name)].annotation,)
        cls = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return cls
