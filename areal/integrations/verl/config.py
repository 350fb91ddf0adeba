"""Configuration of the engine in verl, and its translation into that of this library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import EngineConfig

from areal.api import LoRAConfig, OptimizerConfig, TrainEngineConfig
from areal.integrations.options import check_options

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}


@dataclass
class ArealEngineConfig(EngineConfig):
    """verl's ``engine`` section. ``dtype`` is the dtype of the computation; parameters are kept in float32.

    Attributes:
        backend: engine and layout of this library, such as ``"fsdp:d2t2"``.
        options: further fields of :class:`~areal.api.TrainEngineConfig`, such as ``{"fp32_head": True}``.
    """

    strategy: str = "areal"
    backend: str = "fsdp:d1"
    options: dict[str, Any] = field(default_factory=dict)


def translated(model: Any, engine: ArealEngineConfig, optimizer: Any) -> TrainEngineConfig:
    """Return the configuration of an engine for the sections of verl's.

    Args:
        model: ``HFModelConfig`` of verl.
        engine: section of this engine.
        optimizer: ``FSDPOptimizerConfig`` of verl, or ``None``.

    Raises:
        ValueError: an option of verl cannot be honoured; names the option, its value and the way out.
    """
    _check_options(model, engine, optimizer)
    fields: dict[str, Any] = {
        "path": model.local_path,
        "backend": engine.backend,
        "dtype": DTYPES[engine.dtype],
        "seed": engine.seed,
        "deterministic": engine.full_determinism,
        "activation_checkpointing": "full" if model.enable_gradient_checkpointing else "none",
        "value_head": model.model_type == "value_model",
    }
    if model.lora_adapter_path or model.lora_rank:
        fields["lora"] = _adapter(model)
    if optimizer is not None and not engine.forward_only:
        # verl owns the schedule: it sets the rate of each step.
        fields["optimizer"] = OptimizerConfig(
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            gradient_clipping=optimizer.clip_grad,
        )
    return TrainEngineConfig(**{**fields, **dict(engine.options)})


def _adapter(model: Any) -> LoRAConfig:
    """Return the configuration of a new adapter, or that of a stored one."""
    if model.lora_adapter_path:
        return LoRAConfig.from_peft(model.lora_adapter_path)
    targets = model.target_modules
    if targets == "all_linear":
        targets = "all-linear"
    elif not isinstance(targets, str):
        targets = tuple(sorted(targets))
    return LoRAConfig(rank=model.lora_rank, alpha=model.lora_alpha, target_modules=targets)


def _check_options(model: Any, engine: ArealEngineConfig, optimizer: Any) -> None:
    """Raise for options that have no meaning for this library's engines, and would be ignored."""
    override = {name: value for name, value in (model.override_config or {}).items() if name != "attn_implementation"}
    options = {
        "engine.dtype": (engine.dtype, DTYPES),
        "engine.router_replay.mode": (engine.router_replay.mode, ["disabled"]),
        "model.use_liger": (model.use_liger, [False]),
        "model.use_fused_kernels": (model.use_fused_kernels, [False]),
        "model.use_remove_padding": (model.use_remove_padding, [True]),
        # Of verl's Megatron engine; here it is `model.lora_rank`.
        "model.lora.rank": (dict(getattr(model, "lora", None) or {}).get("rank", 0), [0]),
        "model.exclude_modules": (model.exclude_modules, [None]),
        "model.target_parameters": (model.target_parameters, [None]),
        "model.override_config": (override or None, [None]),
        # Without an optimizer, and in sections without these options, they have their defaults.
        "optim.optimizer": (getattr(optimizer, "optimizer", "AdamW"), ["AdamW"]),
        "optim.optimizer_impl": (getattr(optimizer, "optimizer_impl", "torch.optim"), ["torch.optim"]),
        "optim.override_optimizer_config": (getattr(optimizer, "override_optimizer_config", None) or None, [None]),
    }
    check_options(options, "engine.strategy = 'areal'", "leave it out, or choose another engine of verl")
