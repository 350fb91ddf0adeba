"""Throughput of one call whose samples name eight adapters, relative to eight calls with one adapter each, in one process.

python -m benchmarks.adapters, with the extra lora
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from areal import FinetuneSpec, LoRAConfig, OptimizerConfig, TrainEngine, TrainEngineConfig, create_engine
from areal.api import Batch, MicroBatchSpec, TokenOutputs
from benchmarks.model import Size, write_model

ADAPTERS = 8
RANK = 8
SIZES = {64: Size(hidden=64, layers=2, vocabulary=1024), 576: Size(hidden=576, layers=4, vocabulary=8192)}
"""Model by hidden size."""

Sample = dict[str, Tensor]


def loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Negative log-likelihood."""
    return -(outputs.logprobs * batch["loss_mask"]).sum()


def samples_of(adapter: int, tokens: int, longest: int, vocabulary: int) -> list[Sample]:
    """Return the samples of one adapter, with lengths that differ between adapters."""
    generator = torch.Generator().manual_seed(adapter)
    lengths, missing = [], tokens
    while missing:
        length = min(missing, longest - int(torch.randint(0, max(1, longest // 4), (), generator=generator)))
        lengths.append(length)
        missing -= length
    return [
        {
            "input_ids": torch.randint(0, vocabulary, (n,), generator=generator),
            "loss_mask": torch.ones(n),
            "adapter": torch.tensor(adapter),
        }
        for n in lengths
    ]


def start(folder: Path, size: Size, budget: int, backend: str) -> TrainEngine:
    """Return an engine with adapters of all layers, whose factors are not zero."""
    write_model(folder, size)
    lora = LoRAConfig(rank=RANK, layer_kinds=("attention", "mlp", "head"))
    engine = create_engine(
        TrainEngineConfig(
            path=str(folder),
            backend=backend,
            dtype="float32",
            lora=lora,
            optimizer=OptimizerConfig(lr=1e-2, gradient_clipping=None),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=budget),
        )
    )
    engine.initialize(FinetuneSpec(total_train_steps=1000))
    for k in range(1, ADAPTERS):
        engine.adapters.add(str(k), seed=k)
    return engine


def together(engine: TrainEngine, batches: list[list[Sample]]) -> list[Tensor]:
    """Run one call, and return the log-probs of all samples."""
    batch = [sample for samples in batches for sample in samples]
    return engine.forward_backward(batch, loss, normalization="sum", returns=("logprobs",)).outputs["logprobs"]


def one_by_one(engine: TrainEngine, batches: list[list[Sample]]) -> list[Tensor]:
    """Run one call for each adapter, and return the log-probs of all samples."""
    return [
        row
        for samples in batches
        for row in engine.forward_backward(samples, loss, normalization="sum", returns=("logprobs",)).outputs[
            "logprobs"
        ]
    ]


Run = Callable[[TrainEngine, list[list[Sample]]], list[Tensor]]


def gradients(engine: TrainEngine) -> list[Tensor]:
    """Copy and discard the gradients of all adapters."""
    copies = []
    for name in engine.adapters.names:
        engine.adapters.select(name)
        copies += [tensor.clone() for _, tensor in engine.named_gradients()]
        engine.zero_grad()
    return copies


def same_bits(engine: TrainEngine, batches: list[list[Sample]]) -> tuple[bool, bool]:
    """Return whether log-probs and gradients of both ways are equal to the bit."""
    results = []
    for run in (together, one_by_one):
        rows = run(engine, batches)
        results.append((rows, gradients(engine)))
    (rows, grads), (other_rows, other_grads) = results
    return _equal(rows, other_rows), _equal(grads, other_grads)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def milliseconds(engine: TrainEngine, batches: list[list[Sample]], rounds: int) -> tuple[float, float]:
    """Return the least CPU time of one call for all adapters, and of one call for each, in alternation."""
    runs: tuple[Run, Run] = (together, one_by_one)
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for taken, run in zip(seconds, runs, strict=True):
            begun = time.process_time()
            run(engine, batches)
            # The first round warms up.
            if number:
                taken.append(time.process_time() - begun)
        gradients(engine)
    return 1e3 * min(seconds[0]), 1e3 * min(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[45, 90, 180, 360, 900], help="tokens of each adapter")
    parser.add_argument("--longest", type=int, default=300, help="tokens of the longest sample")
    parser.add_argument("--budget", type=int, default=10_000, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="fsdp:d1")
    options = parser.parse_args()

    print(f"{ADAPTERS} adapters of rank {RANK}, {options.backend}, {torch.get_num_threads()} threads")
    print("hidden  tokens/adapter  one call  a call each  throughput  same bits: log-probs, gradients")
    for hidden in options.hidden:
        size = SIZES[hidden]
        with (
            tempfile.TemporaryDirectory() as folder,
            start(Path(folder), size, options.budget, options.backend) as engine,
        ):
            # A step makes B differ from zero.
            for k, name in enumerate(engine.adapters.names):
                engine.adapters.select(name)
                one_by_one(engine, [samples_of(k, 45, 45, size.vocabulary)])
            _step(engine)
            for tokens in options.tokens:
                batches = [samples_of(k, tokens, options.longest, size.vocabulary) for k in range(ADAPTERS)]
                same = same_bits(engine, batches)
                mixed, single = milliseconds(engine, batches, options.rounds)
                ratio = single / mixed
                print(f"{hidden:6} {tokens:15} {mixed:6.1f} ms {single:9.1f} ms {ratio:9.2f} x  {same}", flush=True)


def _step(engine: TrainEngine) -> None:
    for name in engine.adapters.names:
        engine.adapters.select(name)
        engine.optimizer_step()


if __name__ == "__main__":
    main()
