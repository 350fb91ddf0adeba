"""Ranks without processes: stand-ins for Ray and its actors, which count what the driver sends and asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError

from areal.dispatch.executor import Handle, RankObjects, Reply
from areal.dispatch.ray.actor import ProcessInfo, RankProcess, StackPosition
from areal.dispatch.ray.results import seal
from areal.dispatch.ray.stored import Store
from areal.dispatch.ray.watch import Limits, Watch
from areal.dispatch.wire import Packed

_numbers = count()
_refs: WeakValueDictionary[int, Ref] = WeakValueDictionary()


REF_BYTES = 150
"""Bytes of a reference of Ray besides its number: most are the address of the owner, also in each of several references of a call."""


class Ref:
    """A reference to a value that a test sets. Its pickle has no value.

    Args:
        value: value that is ready.
        ready: False for a value that a test sets later.
        holds: object with further references, which exist as long as this one.

    Attributes:
        its: future of the value.
        callbacks: futures that were made, each of which costs Ray a callback.
    """

    def __init__(self, value: Any = None, *, ready: bool = True, holds: Any = None) -> None:
        self.its: Future[Any] = Future()
        self.callbacks, self._holds = 0, holds
        self.number = next(_numbers)
        _refs[self.number] = self
        if ready:
            self.its.set_result(value)

    def future(self) -> Future[Any]:
        self.callbacks += 1
        return self.its

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self.number, bytes(REF_BYTES))


def _find(number: int, _: bytes) -> Ref:
    return _refs[number]


class SimulatedRay:
    """The functions of Ray that the driver calls.

    Attributes:
        stored: bytes that were put.
        sent: bytes of the arguments of calls.
        returned: bytes of the replies to calls that ran.
        asked, read: references in all calls of ``wait`` and of ``get``.
    """

    def __init__(self) -> None:
        self.stored = self.sent = self.returned = self.asked = self.read = 0

    def put(self, value: Any) -> Ref:
        pickled = cloudpickle.dumps(value)
        self.stored += len(pickled)
        return Ref(pickled, holds=value)

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        """Return values, or raise the first error. What was put is a copy."""
        if isinstance(refs, Ref):
            self.read += 1
            if not refs.its.done():
                raise GetTimeoutError
            value = refs.its.result()
            return cloudpickle.loads(value) if isinstance(value, bytes) else value
        return [self.get(ref) for ref in refs]

    def wait(self, refs: Sequence[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        self.asked += len(refs)
        done = [ref.its.done() for ref in refs]
        return (
            [ref for ref, its in zip(refs, done, strict=True) if its],
            [ref for ref, its in zip(refs, done, strict=True) if not its],
        )


@pytest.fixture
def simulated_ray(monkeypatch: pytest.MonkeyPatch) -> SimulatedRay:
    """Replace Ray in this process."""
    its = SimulatedRay()
    for name in ("put", "get", "wait"):
        monkeypatch.setattr(ray, name, getattr(its, name))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    return its


class Remote:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Ref]) -> None:
        self.remote = method


class SilentRank:
    """A rank that replies when a test says so.

    Attributes:
        replies: references of the replies to its calls.
        life: fails when the process ends.
    """

    def __init__(self) -> None:
        self.replies: list[Ref] = []
        self.life = Ref(ready=False)
        self.run, self.live, self.position = Remote(self._run), Remote(lambda: self.life), Remote(self._position)

    def _run(self, what: str, pickled: Any, argument: Any, refs: list[Any]) -> Ref:
        self.replies.append(Ref(ready=False))
        return self.replies[-1]

    def _position(self) -> Ref:
        return Ref(StackPosition(0, "somewhere"))


VALUE = seal(None, "the result", 2**20)
"""Sealed result of a rank that replies nothing."""


class PromptRank(SilentRank):
    """A rank that replies at once, without running the call.

    Args:
        value: sealed result of all calls.
    """

    def __init__(self, value: Packed = VALUE) -> None:
        super().__init__()
        self._value = value

    def _run(self, what: str, pickled: Any, argument: Any, refs: list[Any]) -> Ref:
        self.replies.append(Ref(Reply(self._value)))
        return self.replies[-1]


class WorkingRank(SilentRank):
    """A rank that runs its calls in this process, with arguments and results that were pickled, and counts these bytes."""

    def __init__(self, rank: int, size: int, its: SimulatedRay) -> None:
        super().__init__()
        self._process, self._ray = RankProcess(rank, 2**30), its
        self._process._objects = self.objects = RankObjects(rank, size)

    def _run(self, what: str, pickled: Any, argument: Any, refs: list[Any]) -> Ref:
        sent = cloudpickle.dumps((what, pickled, argument, refs))
        self._ray.sent += len(sent)
        what, pickled, argument, refs = cloudpickle.loads(sent)
        # Ray reads references among the arguments themselves, and no others.
        work = pickled.its.result() if isinstance(pickled, Ref) else pickled
        reply = self._process.run(what, cloudpickle.loads(work) if isinstance(pickled, Ref) else work, argument, refs)
        self._ray.returned += len(cloudpickle.dumps(reply))
        return Ref(reply)


class SimulatedWorkers:
    """Implements :class:`~areal.dispatch.executor.Executor` on simulated ranks."""

    in_driver = False
    max_result_bytes = 2**30
    generation = 0
    lost: Exception | None = None

    def __init__(self, ranks: Sequence[SilentRank], **limits: float) -> None:
        self.ranks, self.size, self.store = tuple(ranks), len(ranks), Store()
        self.nodes = ("a node",) * self.size
        self.ended: list[str] = []
        infos = [ProcessInfo(f"node{n}", f"10.0.0.{n % 250}", 100 + n, n, (), (), ()) for n in range(self.size)]
        processes: Any = SimpleNamespace(
            actors=self.ranks,
            process_infos=infos,
            end=lambda: self.ended.append("all"),
            end_rank=lambda rank: self.ended.append(f"rank {rank}"),
        )
        self.watch = Watch(processes, Limits(**{"hang_seconds": 600.0, "grace_seconds": 600.0} | limits))

    def put(self, value: Any, *, keep: bool = False, readers: int = 1) -> Handle:
        return self.store.put(value, keep=keep, readers=readers)

    def share(self, handle: Handle, nbytes: int, references: int, readers: int) -> Handle:
        return self.store.share(handle, nbytes, references, readers)

    def ship(self, function: Any, what: str) -> Handle:
        return self.store.ship(function, what, lambda _: "")

    def start(self, what: str, work: Any, arguments: Sequence[Any]) -> Future[list[Reply]]:
        return self.watch.submit(what, work, arguments)

    def restart(self, size: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.watch.end(RuntimeError("closed"))
        self.watch.join()


@contextmanager
def simulated(ranks: Sequence[SilentRank], **limits: float) -> Iterator[SimulatedWorkers]:
    """Yield an executor of simulated ranks, and end it."""
    workers = SimulatedWorkers(ranks, **limits)
    try:
        yield workers
    finally:
        workers.close()
