"""Costs of dispatch in addition to those of the engine: dividing a batch, sending a shard to a rank, and a call on all ranks.

python -m benchmarks.dispatch, with the extra ray
"""

from __future__ import annotations

import pickle
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
import torch
from torch import Tensor

from areal import FinetuneSpec, OptimizerConfig, TrainEngine, TrainEngineConfig, create_engine
from areal.api import Batch, MicroBatchSpec, StepOutput, TokenOutputs
from areal.dispatch import WorkerGroup
from areal.dispatch.executor import RankObjects
from areal.dispatch.ray import RayWorkers
from areal.dispatch.ray.actor import RankProcess
from areal.dispatch.ray.processes import Processes
from areal.dispatch.ray.replies import Call, Replies
from areal.dispatch.ray.watch import Limits, Watch
from areal.dispatch.shards import plan_shards
from areal.dispatch.wire import pack_tensors, unpack_tensors
from benchmarks.model import Size, write_model

E = TypeVar("E", bound=TrainEngine)

_Rank: Any = cast(Any, ray.remote)(concurrency_groups={"health": 2, "life": 1})(RankProcess)

RANKS = (64, 1024)
COLLECT_LIMIT = 4
"""Time of reading the replies of the most ranks, at most, relative to one ``ray.get`` of them."""

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


def loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Return a policy gradient without a ratio."""
    return -(outputs.logprobs * batch["advantages"] * batch["loss_mask"]).sum()


def started(engine: E) -> E:
    """Initialize an engine, or a group."""
    engine.initialize(FinetuneSpec(total_train_steps=1000))
    return engine


def step_ms(engine: TrainEngine, samples: list[dict[str, Tensor]]) -> float:
    """Return the milliseconds of a step for its caller."""
    start = time.perf_counter()
    engine.train_batch(samples, loss)
    return 1e3 * (time.perf_counter() - start)


def record(engine: Any, _: None) -> None:
    """Let the engine of a rank record the milliseconds of its steps."""
    train_batch, engine.recorded_ms = engine.train_batch, []

    def recording(*args: Any, **options: Any) -> StepOutput:
        start = time.perf_counter()
        step: StepOutput = train_batch(*args, **options)
        engine.recorded_ms.append(1e3 * (time.perf_counter() - start))
        return step

    engine.train_batch = recording


def recorded_ms(engine: Any, _: None) -> list[float]:
    """Return what :func:`record` has recorded."""
    return engine.recorded_ms


def print_calls(path: str) -> None:
    """Print what a step of a group costs in addition to the engine's own call."""
    samples = batch_of(*SIZES["16 to 96 tokens"])

    def config(backend: str) -> TrainEngineConfig:
        return TrainEngineConfig(path=path, backend=backend, dtype="float32", optimizer=OptimizerConfig(lr=1e-4))

    # In turn, so that both see the same load.
    with started(create_engine(config("fsdp:d1"))) as engine, started(WorkerGroup(config("fsdp:d1"))) as group:
        pairs = [(step_ms(engine, samples), step_ms(group, samples)) for _ in range(ROUNDS)][2:]
        ratio = statistics.median(handle for _, handle in pairs) / statistics.median(alone for alone, _ in pairs)
        print(f"in this process: a step takes {ratio:.3f} times that of the engine alone")
    with RayWorkers(2, environment={"OMP_NUM_THREADS": "1"}) as workers:
        for backend in ("fsdp:d2", "fsdp:t2"):
            with started(WorkerGroup(config(backend), workers, name=backend)) as group:
                group.run(record)
                steps = [step_ms(group, samples) for _ in range(2 * ROUNDS)]
                slowest = [max(ranks) for ranks in zip(*group.run(recorded_ms), strict=True)]
            pairs = list(zip(steps, slowest, strict=True))[2:]
            extra = sorted(caller - rank for caller, rank in pairs)
            ratio = statistics.median(caller / rank for caller, rank in pairs)
            print(
                f"{backend} in Ray actors: {statistics.median(extra):.1f} ms (least {extra[0]:.1f}) in addition to the call of "
                f"{statistics.median(slowest):.0f} ms on the slowest rank; {ratio:.3f} times that call"
            )


def nothing(rank_objects: RankObjects, _: None) -> None:
    """Return at once."""


def read_ms(refs: list[ray.ObjectRef]) -> tuple[float, float]:
    """Return the milliseconds in which replies are read that have arrived: by one ``ray.get``, and as the replies of a call."""
    ray.wait(refs, num_returns=len(refs))
    events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    replies, call = Replies(events.put, lambda: None), Call("nothing", [None] * len(refs), dict(enumerate(refs)))
    start = time.perf_counter()
    replies.send(call, partial(replies.add, call))
    while not call.future.done():
        seconds = replies.due - time.monotonic()
        if seconds > 0:
            with suppress(queue.Empty):
                events.get(timeout=min(seconds, 1.0))()
        else:
            replies.take_arrived()
    middle = time.perf_counter()
    ray.get(refs)
    return 1e3 * (time.perf_counter() - middle), 1e3 * (middle - start)


def slow_collection(size: int, ratio: float) -> str:
    """Return the text of a failure if replies are read too slowly, or an empty string.

    Args:
        size: number of replies.
        ratio: time of reading them relative to one ``ray.get``, measured in one run.
    """
    if ratio <= COLLECT_LIMIT:
        return ""
    return f"{size} replies are read in {ratio:.1f} times the time of one ray.get of them, and at most {COLLECT_LIMIT} is allowed"


def print_scale(size: int) -> float:
    """Print what a call on many ranks costs the driver, and the same calls by Ray alone. Two processes reply for all ranks.

    Returns the time of reading the replies, relative to one ``ray.get`` of them.
    """
    processes = [_Rank.remote(0, 2**20) for _ in range(2)]
    infos = ray.get([process.process_info.remote() for process in processes])
    actors = [processes[rank % 2] for rank in range(size)]
    ranks = Processes(tuple(actors), tuple(infos[rank % 2] for rank in range(size)), None)
    watch, pickled = Watch(ranks, Limits(600.0, 600.0)), ray.cloudpickle.dumps(nothing)

    def timed(send: Callable[[], Any], collect: Callable[[Any], object]) -> tuple[float, float, float]:
        cpu, start = time.process_time(), time.perf_counter()
        sent = send()
        middle = time.perf_counter()
        collect(sent)
        return middle - start, time.perf_counter() - middle, time.process_time() - cpu

    # In turn, so that both see the same load.
    rounds = [
        (
            timed(lambda: [actor.run.remote("nothing", pickled, None) for actor in actors], ray.get),
            timed(lambda: watch.submit("nothing", nothing, [None] * size), Future.result),
        )
        for _ in range(ROUNDS)
    ][2:]
    for name, its in zip(("Ray alone", "a call"), zip(*rounds, strict=True), strict=True):
        send, collect, cpu = (1e3 * statistics.median(column) for column in zip(*its, strict=True))
        print(
            f"{size} ranks, {name}: send {send:.0f} ms, collect {collect:.0f} ms, driver {cpu / size:.3f} ms of CPU time per rank"
        )
    rows = [read_ms([actor.run.remote("nothing", pickled, None) for actor in actors]) for _ in range(ROUNDS)][2:]
    alone, own = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"{size} replies that have arrived: {own:.1f} ms, {own / alone:.1f} times one ray.get of them ({alone:.1f} ms)"
    )
    watch.end(RuntimeError("the benchmark has ended"))
    watch.join()
    return own / alone


def main() -> None:
    """Print the costs of a shard in CPU time with the ratio of both ways, and those of a call in wall time.

    Raises:
        SystemExit: the replies of the largest number of ranks are read too slowly.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), Size())
        print_calls(folder)
    ratios = {size: print_scale(size) for size in RANKS}
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
    if failure := slow_collection(RANKS[-1], ratios[RANKS[-1]]):
        raise SystemExit(failure)


if __name__ == "__main__":
    main()
