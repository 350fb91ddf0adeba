"""Local samplers of tiny models, with the adapters of a real engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal import FinetuneSpec, LoRAConfig, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api.engine import TrainEngine
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.unit.inference.local.rollouts import tokenizer
from areal.tinker.backends.prepared import SamplingRequest, SamplingResult
from areal.tinker.backends.sampling.local_sampler import LocalSampler, create

CONTEXT = 128
PROMPT = [(7 * i + 3) % VOCAB for i in range(41)]
SETTINGS = {"dtype": "float32", "max_context": CONTEXT, "max_requests": 16, "cache_tokens": 2048}
ENDLESS: dict[str, Any] = {"stop_token_ids": ()}
"""Without end tokens: every answer has ``max_tokens``."""


def base_model(*, tied: bool = True) -> str:
    return model_dir("qwen3", tie_word_embeddings=tied)


def with_tokenizer(folder: Path) -> str:
    """Copy the model to a directory, and add a tokenizer of its vocabulary."""
    path = folder / "model"
    shutil.copytree(base_model(), path)
    tokenizer().save_pretrained(path)
    return str(path)


def trained_engine(path: str, names: tuple[str, ...] = ("default",), **settings: Any) -> TrainEngine:
    """Return an engine whose adapters have trained for two steps, each on other data."""
    lora = LoRAConfig(**{"rank": 4, "alpha": 32.0, "layer_kinds": ("attention", "mlp", "head"), **settings})
    engine = create_engine(TrainEngineConfig(path=path, dtype="float32", lora=lora, optimizer=OptimizerConfig(lr=3e-2)))
    engine.initialize(FinetuneSpec(total_train_steps=10))
    for seed, name in enumerate(names):
        if name != "default":
            engine.adapters.add(name, lora, seed=seed)
        engine.adapters.select(name)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            ids = torch.randint(0, VOCAB, (30,), generator=generator)
            engine.train_batch(
                [{"input_ids": ids, "loss_mask": torch.ones(30)}],
                lambda outputs, mb: -(outputs.logprobs * mb["loss_mask"]).sum(),
            )
    return engine


def engine_logprobs(engine: TrainEngine, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Return the log-probs of all tokens but the first."""
    sample = {"input_ids": torch.tensor(tokens), "temperature": torch.tensor(temperature)}
    return engine.forward_batch([{**sample, "loss_mask": torch.ones(len(tokens))}])[0][:-1]


def serve(
    work: Callable[[LocalSampler], Awaitable[Any]], path: str | None = None, config: dict[str, Any] | None = None
) -> Any:
    """Run a coroutine function on a sampler, with the snapshot ``base`` of the model."""

    async def main() -> Any:
        sampler = create(path or base_model(), {**SETTINGS, **(config or {})})
        try:
            await sampler.open("base", None)
            return await asyncio.wait_for(work(sampler), 60)  # type: ignore[arg-type]
        finally:
            await sampler.close()

    return asyncio.run(main())


def sampled(path: str | None = None, snapshot: str = "base", **fields: Any) -> SamplingResult:
    """Return the result of one request to a new sampler."""
    request = SamplingRequest(**{"prompt": PROMPT, **ENDLESS, **fields})
    return serve(lambda sampler: sampler.sample(snapshot, request), path)
