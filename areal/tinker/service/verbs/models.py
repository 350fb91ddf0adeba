"""Verbs that create and release a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.tinker.backends.backend import ModelLimits
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdapterSpec
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.params import MAX_INTEGER, check_base_model, check_integer, check_keys, check_number
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.verbs.verb import Capabilities, ModelRequest, RequestTurn, TrainingRequest
from areal.tinker.service.verbs.weights import load_checkpoint

_ADAPTER_KEYS = {"rank", "alpha", "seed", "train_attn", "train_mlp", "train_unembed"}


def check_adapter(config: Mapping[str, Any] | None, limits: ModelLimits) -> AdapterSpec:
    """Return the adapter that ``lora_config`` describes."""
    if config is None:
        raise UserError("lora_config is missing: this server trains adapters; give lora_config with a rank")
    check_keys("lora_config", config, _ADAPTER_KEYS)
    rank = check_integer("lora_config.rank", config.get("rank"), 1, limits.max_rank)
    seed = config.get("seed")
    if seed is not None:
        check_integer("lora_config.seed", seed, -MAX_INTEGER)
    alpha = config.get("alpha")
    if alpha is not None and check_number("lora_config.alpha", alpha) <= 0:
        raise UserError(f"lora_config.alpha is {alpha}: it must be above 0")
    # Kinds of layers default to true in the protocol.
    kinds = {key: config.get(key) for key in ("train_attn", "train_mlp", "train_unembed")}
    for key, value in kinds.items():
        if value is not None and not isinstance(value, bool):
            raise UserError(f"lora_config.{key} is {value!r}: it must be true or false")
    attention, mlp, head = (value is not False for value in kinds.values())
    if not (attention or mlp or head):
        raise UserError(
            "lora_config trains no layers: at least one of train_attn, train_mlp and train_unembed must be true"
        )
    return AdapterSpec(
        rank=rank, seed=seed, attention=attention, mlp=mlp, head=head, alpha=None if alpha is None else float(alpha)
    )


@dataclass(frozen=True)
class CreateModel(TrainingRequest, kind="create_model"):
    """create_model.

    The model's id is ``{session_id}:train:{model_seq_id}``. A retry with the same digest gives the same future.
    """

    session_id: str
    model_seq_id: int
    digest: bytes
    base_model: str | None = None
    lora_config: Mapping[str, Any] | None = None
    optimizer_config: Mapping[str, Any] | None = None
    user_metadata: Mapping[str, str] | None = None

    def canonical_base_model(self, settings: ServiceSettings) -> str:
        """Return the canonical name of the base model."""
        return check_base_model(self.base_model or "", settings)

    def check(self, model: TrainedModel, server: Capabilities) -> AdapterSpec | None:
        return check_adapter(self.lora_config, server.limits)

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        model = turn.model
        await turn.require_backend()
        model.in_backend = True
        model.spec = turn.prepared
        try:
            await turn.call(turn.backend.create_model, model.id, turn.prepared)
        except UserError:
            model.in_backend = False
            raise
        model.pending = False
        await turn.store_model()
        return {"type": "create_model", "model_id": model.id}


@dataclass(frozen=True)
class CreateFromCheckpoint(CreateModel, kind="load_weights"):
    """load_weights that creates a model. The checkpoint describes the adapter."""

    path: str = ""
    optimizer: bool = False

    def canonical_base_model(self, settings: ServiceSettings) -> str:
        return settings.base_models[0] if self.base_model is None else super().canonical_base_model(settings)

    def check(self, model: TrainedModel, server: Capabilities) -> None:
        return None

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        return await load_checkpoint(turn, self.path, with_optimizer=self.optimizer)


@dataclass(frozen=True)
class UnloadModel(ModelRequest, kind="unload_model"):
    """unload_model of old clients: releases the adapter. Checkpoints stay."""

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        model_id = turn.model.id
        await turn.release_model(f"{model_id} was unloaded: create a model from its last checkpoint")
        return {"type": "unload_model", "model_id": model_id}
