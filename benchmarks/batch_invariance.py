"""Cost of batch invariance on a CPU: log-probs, a training step and generation, each with and without it, in one process.

python -m benchmarks.batch_invariance
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from areal import FinetuneSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import Batch, TokenOutputs, TrainEngine
from areal.inference import LocalRollout, Sampling

LENGTHS = tuple(60 + 17 * i for i in range(16))
"""Lengths of the sequences of a step, 3,000 tokens."""

REQUESTS, NEW_TOKENS = 16, 32

Call = Callable[[], object]


def write_model(folder: Path, hidden: int) -> str:
    """Write a model of four layers. Returns its directory."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def samples() -> list[dict[str, Tensor]]:
    """Return sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 8192, (length,), generator=generator)} for length in LENGTHS]


def loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Return the negative log-likelihood."""
    logprobs = outputs.logprobs
    return -logprobs.sum() if logprobs is not None else torch.zeros(())


def engine_of(path: str, dtype: str, *, invariant: bool) -> TrainEngine:
    """Return an engine that is ready."""
    engine = create_engine(
        TrainEngineConfig.model_validate(
            {
                "path": path,
                "dtype": dtype,
                "fsdp": {"batch_invariant": invariant},
                "optimizer": OptimizerConfig(lr=1e-4, gradient_clipping=None),
            }
        )
    )
    engine.initialize(FinetuneSpec(total_train_steps=1000))
    return engine


def generation(path: str, dtype: str, *, invariant: bool) -> Call:
    """Return a call that generates :data:`REQUESTS` answers together."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    rollout = LocalRollout(model, max_context=512, max_requests=REQUESTS, batch_invariant=invariant)
    prompts = [sample["input_ids"].tolist() for sample in samples()[:REQUESTS]]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, stop_token_ids=(), seed=0)

    async def together() -> Sequence[object]:
        return await asyncio.gather(*(rollout.generate(prompt, sampling) for prompt in prompts))

    def generate() -> Sequence[object]:
        # Updates of weights forget cached prompts: every round computes them.
        rollout.update(iter(()), rollout.version + 1, complete=False)
        return asyncio.run(together())

    return generate


def measure(path: str, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Return the ratio of CPU seconds with and without batch invariance in each round, by call. The first round is a warm-up."""
    batch = samples()
    calls: dict[str, list[Call]] = {"log-probs": [], "training step": [], "generation": []}
    for invariant in (True, False):
        engine = engine_of(path, dtype, invariant=invariant)
        calls["log-probs"].append(lambda engine=engine: engine.forward_batch(batch))  # type: ignore[misc]
        calls["training step"].append(lambda engine=engine: engine.train_batch(batch, loss))  # type: ignore[misc]
        calls["generation"].append(generation(path, dtype, invariant=invariant))
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, pair in calls.items():
            with_it, without = (_seconds(call) for call in pair)
            ratios[name].append(with_it / without)
    return {name: each[1:] for name, each in ratios.items()}


def _seconds(call: Call) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    """Print a line for each dtype and call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds after a warm-up")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(write_model(Path(folder), options.hidden), dtype, options.rounds)
        for name, ratios in results.items():
            print(
                f"{dtype}, {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True
            )


if __name__ == "__main__":
    main()
