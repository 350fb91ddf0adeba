"""Overhead of an engine: in a training step, in splitting a large batch, and of a step on one rank and on several.

python -m benchmarks.overhead, or torchrun --nproc-per-node 2 -m benchmarks.overhead
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from areal import FinetuneSpec, MicroBatchSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import TrainEngine
from benchmarks.engine_row import trained_tokens, weighted_nll
from benchmarks.model import Size, write_model
from benchmarks.workloads import load

ROUNDS = 9
SEQUENCES, LENGTH = 512, 2048


def engine_of(path: str, ranks: int, spec: MicroBatchSpec, layout: str = "d") -> TrainEngine:
    """Start an FSDP engine on all ranks."""
    config = TrainEngineConfig(
        path=path,
        backend=f"fsdp:{layout}{ranks}",
        dtype="float32",
        optimizer=OptimizerConfig(lr=1e-4),
        mb_spec=spec,
    )
    engine = create_engine(config)
    engine.initialize(FinetuneSpec(total_train_steps=1000))
    return engine


def median_ms(work: Callable[[], object]) -> tuple[float, float]:
    """Return the median and least milliseconds of a call, after one warm-up call."""
    work()
    result = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        result.append(1e3 * (time.perf_counter() - start))
    return statistics.median(result), min(result)


def large_batch() -> dict[str, Tensor]:
    """Return sequences with three more keys, as in a GRPO step."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8192, (SEQUENCES, LENGTH), generator=generator)
    floats = {key: torch.rand(SEQUENCES, LENGTH, generator=generator) for key in ("advantages", "old_logprobs")}
    mask = torch.arange(LENGTH).expand(SEQUENCES, -1) >= 512
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask.float(), **floats}


def main() -> None:
    """Print both overheads."""
    torch.set_num_threads(1)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    size, workload = Size(), load("ragged")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), size)
        with engine_of(folder, ranks, MicroBatchSpec()) as engine:
            samples = [
                {"input_ids": ids, "weights": weights, "output_mask": trained}
                for ids, weights, trained in zip(workload.input_ids, workload.weights, workload.trained, strict=True)
            ]
            steps = [engine.train_batch(samples, weighted_nll, trained_tokens) for _ in range(ROUNDS)][1:]
            fractions = sorted(step.timings["data"] / step.seconds for step in steps)
            if rank == 0:
                own = statistics.median(fractions)
                print(f"{ranks} ranks, {workload.tokens} tokens each: {own:.2%} of a step is the engine's own")
            ids = torch.randint(0, size.vocabulary, (64, 128), generator=torch.Generator().manual_seed(rank))
            full = [{"input_ids": row, "weights": torch.ones(128), "output_mask": torch.ones(128)} for row in ids]
            speeds = [ranks * ids.numel() / engine.train_batch(full, weighted_nll).seconds for _ in range(6)][1:]
            if rank == 0:
                low, high = min(speeds), max(speeds)
                middle = statistics.median(speeds)
                print(f"{ranks} ranks, 8192 tokens each: {middle:,.0f} tokens per second ({low:,.0f} to {high:,.0f})")
        cut = MicroBatchSpec(max_tokens_per_mb=16384)
        batch = large_batch()
        shared = {**batch, "input_ids": batch["input_ids"].clone()}
        shared["input_ids"][:, :512] = batch["input_ids"][::8, :512].repeat_interleave(8, 0)
        for layout, spec, passed, what in (
            ("d", cut, batch, "a batch of its own on each rank"),
            ("c", cut, batch, "one batch, compared on all ranks"),
            ("d", cut.model_copy(update={"share_prefixes": True}), shared, "groups of 8, prefixes shared"),
        ):
            with engine_of(folder, ranks, spec, layout) as engine:
                median, least = median_ms(partial(engine.microbatches, passed))
                if rank == 0:
                    print(f"{ranks} ranks, {SEQUENCES} x {LENGTH} tokens, {what}: {median:.1f} ms (least {least:.1f})")


if __name__ == "__main__":
    main()
