"""Costs of dispatch in addition to those of the engine: dividing a batch, and sending a shard to a rank.

python -m benchmarks.dispatch
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal.api import MicroBatchSpec
from areal.dispatch.shards import plan_shards
from areal.dispatch.wire import pack_tensors, unpack_tensors

ROUNDS = 15
SAMPLES = 64
SIZES = {"16 to 96 tokens": (16, 96), "2,000 tokens": (2000, 2000)}
"""Shortest and longest sample of a batch."""


def batch_of(shortest: int, longest: int) -> list[dict[str, Tensor]]:
    """Return samples with three keys."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (SAMPLES,), generator=generator).tolist()
    return [
        {
            "input_ids": torch.randint(0, 8192, (n,), generator=generator),
            "loss_mask": torch.ones(n),
            "advantages": torch.rand(n, generator=generator),
        }
        for n in lengths
    ]


def least_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the least milliseconds of CPU time of a call, after one warm-up call."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return 1e3 * min(seconds)


def dump(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value as an object store does: large buffers are not copied into the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def transfer_ms(samples: list[dict[str, Tensor]], rounds: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the milliseconds of CPU time of put and get: of the list itself, and of flat arrays."""

    def get(data: bytes, buffers: list[pickle.PickleBuffer]) -> object:
        return pickle.loads(data, buffers=buffers)

    plain, packed = dump(samples), dump(pack_tensors(samples))
    return (
        (least_ms(lambda: dump(samples), rounds), least_ms(partial(get, *plain), rounds)),
        (
            least_ms(lambda: dump(pack_tensors(samples)), rounds),
            least_ms(lambda: unpack_tensors(pickle.loads(packed[0], buffers=packed[1])), rounds),
        ),
    )


def main() -> None:
    """Print the costs of a shard in CPU time, and the ratio of both ways."""
    torch.set_num_threads(1)
    for name, (shortest, longest) in SIZES.items():
        samples = batch_of(shortest, longest)
        plain, packed = transfer_ms(samples, ROUNDS)
        print(f"{SAMPLES} samples of {name}")
        print(f"  list of dicts: put {plain[0]:.2f} ms, get {plain[1]:.2f} ms")
        print(
            f"  flat arrays: put {packed[0]:.2f} ms, get {packed[1]:.2f} ms; {sum(plain) / sum(packed):.0f} times cheaper"
        )
        for sharing in (False, True):
            spec = MicroBatchSpec(share_prefixes=sharing)
            what = "with shared prefixes" if sharing else "by cost"
            print(
                f"  check and divide for 4 ranks, {what}: {least_ms(partial(plan_shards, samples, spec, 4), ROUNDS):.2f} ms"
            )


if __name__ == "__main__":
    main()
