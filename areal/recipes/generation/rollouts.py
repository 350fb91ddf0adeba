"""Where the answers of a run come from: a replica of the model on each rank, or servers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from areal import inference  # its names are imported when they are first used
from areal.api import TrainEngine
from areal.engine.model.heads import decoder_layers
from areal.engine.model.hub import experts_per_layer, read_config
from areal.engine.model.media import image_rules, model_factory
from areal.engine.torch.quantization.layers import round_layers
from areal.recipes.generation.context import sizes_of_replica
from areal.recipes.generation.started_server import StartedServer
from areal.recipes.policy_config import PolicyConfig
from areal.trainer.ppo import Sync
from areal.utils.distributed import rank_in_world

_SIZES = {"max_requests": 64, "page_size": 16}
"""Answers that a replica generates at once, and the tokens of a page of its cache."""

_DIALECTS = {"vllm": "VLLM", "sglang": "SGLang"}


def make_rollout(config: PolicyConfig, engine: TrainEngine, max_context: int | None, closing: ExitStack) -> Any:
    """Return a rollout engine as the settings say. Collective.

    Args:
        config: settings of the run.
        engine: the policy, initialized.
        max_context: maximum number of tokens of a prompt with its answers, for a replica; ``None`` if only the episodes know it.
        closing: closes the rollout, and ends a server that was started.

    Raises:
        ValueError: an option is unknown, or a server is not started as it must be.
    """
    if config.servers or config.start_server is not None:
        replay = _replay_options(config)
        urls = list(config.servers) or [_start_server(config, engine, closing)]
        dialect = getattr(inference, _DIALECTS[config.server_kind])(**replay)
        options: dict[str, Any] = {"folder": config.output / "weights", "model": config.model}
        options |= {"quantization": engine.config.fsdp.quantization, **config.rollout}
        return closing.enter_context(inference.HTTPRollout(urls, dialect, control=engine.control, **options))
    dtype = getattr(torch, engine.config.dtype)
    factory = model_factory(read_config(config.model))
    model: Any = factory.from_pretrained(config.model, dtype=dtype, attn_implementation="sdpa")
    _round_as_the_trainer(model, engine)
    invariant = {"batch_invariant": engine.config.fsdp.batch_invariant}
    options = {**_SIZES, **invariant, **config.rollout}
    max_context = options.get("max_context", max_context)
    options = sizes_of_replica(config, engine.dp_size, max_context, options) | options
    return closing.enter_context(inference.LocalRollout(model.to(engine.device).eval(), **options))


def _round_as_the_trainer(model: PreTrainedModel, engine: TrainEngine) -> None:
    """Let a replica round the operands of its layers as the layers of an engine do, in place."""
    if engine.config.fsdp.quantization is not None:
        round_layers(decoder_layers(model), engine.config.fsdp.quantization)


def _replay_options(config: PolicyConfig) -> dict[str, Any]:
    """Return the options of a dialect with which answers have the experts of each token, if the settings ask for them.

    Raises:
        ValueError: the model has no experts.
    """
    if not config.routing_replay:
        return {}
    model = read_config(config.model).get_text_config()
    if not experts_per_layer(model):
        raise ValueError(f"routing_replay = True, but model = {config.model!r} has no experts: leave it out")
    return {"routed_experts": True if config.server_kind == "vllm" else model.num_experts_per_tok}


def check_pictures(config: PolicyConfig) -> None:
    """Raise unless the rollout engine that the settings make answers prompts with pictures.

    Raises:
        ValueError: answers come from SGLang servers, or the images of the model are not those of Qwen2-VL and its successors.
    """
    if config.server_kind == "sglang" and (config.servers or config.start_server is not None):
        raise ValueError(
            "a prompt has a picture, and SGLang servers get tokens alone: take vLLM, or leave servers and start_server out, so that a replica "
            "in this process generates; or leave such rows out"
        )
    rules = image_rules(read_config(config.model), text_only=False)
    if rules is not None and rules.bidirectional:
        raise ValueError(
            f"a prompt has a picture, and model = {config.model!r} computes images in both directions, which a replica cannot, and servers "
            "get no such images: leave such rows out, or choose a Qwen model with images"
        )


def _start_server(config: PolicyConfig, engine: TrainEngine, closing: ExitStack) -> str:
    """Start a server on the first rank, and return its address on all ranks. An error is raised on all."""

    def start() -> str | None:
        if rank_in_world() or config.start_server is None:
            return None
        log = config.output / "server.log"
        flags = ("--enable-return-routed-experts",) if config.routing_replay else ()
        invariant = engine.config.fsdp.batch_invariant
        server = StartedServer(
            config.start_server, config.model, config.server_kind, log, flags=flags, batch_invariant=invariant
        )
        return closing.enter_context(server).url

    return next(url for url in engine.control.attempt_and_gather(start) if url is not None)


def sync_of(rollout: Any) -> Sync:
    """Return the function that sends an engine's weights to a rollout engine: its own ``sync``, or its ``update``.

    Raises:
        ValueError: the rollout has neither.
    """
    if hasattr(rollout, "sync"):
        return rollout.sync
    if hasattr(rollout, "update"):
        return lambda engine, version: rollout.update(engine.named_tensors(), version)
    raise ValueError(f"rollout = {rollout!r} has neither sync nor update: pass sync=, which sends it the weights")
