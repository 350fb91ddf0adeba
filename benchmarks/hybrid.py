"""Training steps of a hybrid model: packed, in padded rows, and by a loop over sequences, in one process.

python -m benchmarks.hybrid
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from areal import FinetuneSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import Batch, TokenOutputs

BATCHES: dict[str, tuple[int, ...]] = {
    "ragged": tuple(60 + 17 * i for i in range(16)),
    "one long": (*[30] * 20, 1024),
}
"""Lengths of the sequences of each batch."""

Sample = dict[str, Tensor]
Step = Callable[[list[Sample]], float]


def write_model(folder: Path, hidden: int = 256) -> str:
    """Write a model of three layers with the gated delta rule and one of attention. Returns its directory."""
    config = Qwen3NextConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def samples(lengths: Sequence[int]) -> list[Sample]:
    """Return sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 8192, (length,), generator=generator)} for length in lengths]


def loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Return the negative log-likelihood."""
    logprobs = outputs.logprobs
    return -logprobs.sum() if logprobs is not None else torch.zeros(())


def engine_step(path: str, attention: str) -> Step:
    """Return a step of the FSDP engine, on all sequences at once."""
    optimizer = OptimizerConfig(lr=1e-4, gradient_clipping=None)
    options: dict[str, Any] = {"dtype": "float32", "fsdp": {"attention": attention}, "optimizer": optimizer}
    engine = create_engine(TrainEngineConfig(path=path, **options))
    engine.initialize(FinetuneSpec(total_train_steps=1000))
    return lambda batch: engine.train_batch(batch, loss).loss


def loop_step(path: str) -> Step:
    """Return a step of transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=OptimizerConfig().weight_decay)

    def step(batch: list[Sample]) -> float:
        tokens = sum(len(sample["input_ids"]) - 1 for sample in batch)
        total = 0.0
        for sample in batch:
            ids = sample["input_ids"]
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            part = F.cross_entropy(logits, ids[1:], reduction="sum") / tokens
            part.backward()
            total += part.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def measure(path: str, batch: list[Sample], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return losses and CPU seconds of each way, in alternation; the first step is a warm-up."""
    steps = {"packed": engine_step(path, "packed"), "rows": engine_step(path, "rows"), "one by one": loop_step(path)}
    results: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            results[name][0].append(step(batch))
            results[name][1].append(time.process_time() - begin)
    return {name: (losses, seconds[1:]) for name, (losses, seconds) in results.items()}


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps after a warm-up")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, lengths in BATCHES.items():
        with tempfile.TemporaryDirectory() as folder:
            results = measure(write_model(Path(folder)), samples(lengths), rounds)
        packed = results["packed"][1]
        for way, (losses, seconds) in results.items():
            ratios = sorted(other / own for other, own in zip(seconds, packed, strict=True))
            print(
                f"{name}, {sum(lengths)} tokens, {way}: {1000 * statistics.median(seconds):.0f} ms of CPU, "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of packed; loss {losses[-1]:.4f}"
            )


if __name__ == "__main__":
    main()
