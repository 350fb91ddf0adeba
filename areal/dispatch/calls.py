"""The calls of one group: what is sent to its ranks, and what becomes of their replies."""

from __future__ import annotations

import itertools
import socket
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from areal.api import LossObjective, MicroBatchSpec, NamedTensor, Pending, TrainEngineConfig
from areal.api.engine import BatchInput, Outputs
from areal.dispatch import rank_calls
from areal.dispatch.errors import refusal
from areal.dispatch.executor import Executor, Handle, PendingCall, Work
from areal.dispatch.rank_calls import Argument, RankLayout, Verb, of_a_rank
from areal.dispatch.remote_stream import RemoteStream
from areal.dispatch.shards import RemoteMicroBatches, ShardPlan, joined_layouts, plan_shards
from areal.dispatch.shared_devices.place import Place
from areal.dispatch.shared_devices.turns import Turn
from areal.dispatch.shared_devices.uses import Use
from areal.dispatch.stored_samples import CallResults, keep_results, put_shard
from areal.dispatch.table import TABLE, Returned, Route, Sent
from areal.engine.loss_call import LossCall

T = TypeVar("T")

DEFAULT_OUTPUTS: Outputs = ("logprobs",)
"""Outputs of a call that names none."""

STREAM_BYTES = 256 * 2**20
"""Bytes of a stream of tensors in one reply of rank 0, or one tensor if it is larger. Half of what the executor sends, if that is less."""

_NOT_INITIALIZED = "the engine cannot be used: it is not initialized: call initialize(FinetuneSpec(...))"
_LOST = "the engine cannot be used, call restart() to go on from the last checkpoint"


class Calls:
    """Sends calls to the ranks of one engine.

    Args:
        executor: processes of the ranks.
        name: name of the engine in the processes.
        config: configuration of the engine.

    Attributes:
        generation: that of the executor's processes in which the engine is.
        place: of the engine on shared devices, or ``None``.
    """

    def __init__(self, executor: Executor, name: str, config: TrainEngineConfig) -> None:
        self.executor, self.name, self.config = executor, name, config
        self.generation = executor.generation
        self.place: Place | None = None
        self._rank_layouts: list[RankLayout] | None = None
        self._numbers = itertools.count()
        # Keys of objects that the driver does not refer to any more. The garbage collector may run in any thread.
        self._unused: list[str] = []
        self._lock = threading.Lock()
        self._ordered = threading.RLock()
        self._shared: set[Path] = set()  # folders that were checked

    # ---- the primitive

    def start(
        self,
        what: str,
        work: Work,
        finish: Callable[[list[Any]], T],
        arguments: Sequence[Any] | None = None,
        *,
        use: Use | None = None,
        keep: Callable[[T, list[Handle | None]], None] | None = None,
    ) -> Pending[T]:
        """Run ``work`` on every rank.

        Args:
            what: name of the call, for errors.
            work: runs in the process of each rank.
            finish: makes the result from the values of all ranks.
            arguments: one for each rank; none by default.
            use: use of the engine, which lasts until the call has ended on the ranks; ``None`` for a call that needs no state.
            keep: as in :class:`~areal.dispatch.executor.PendingCall`.
        """
        self._drop_unused()
        arguments = [None] * self.executor.size if arguments is None else arguments
        begun = self._begin(use, call=True)
        try:
            # An engine in this process runs one call at a time.
            with self._ordered:
                replies = self.executor.start(what, work, arguments)
        except BaseException:
            if begun is not None:
                begun.end()
            raise
        if begun is not None:
            begun.end_with(replies)
        return PendingCall(replies, finish, keep)

    def run(
        self, what: str, work: Work, arguments: Sequence[Any] | None = None, *, use: Use | None = None
    ) -> list[Any]:
        """Run ``work`` on every rank, and return the values of all ranks."""
        return self.start(what, work, list, arguments, use=use).result()

    # ---- the engine's life

    def take_rank_layouts(self, rank_layouts: list[RankLayout] | None) -> None:
        """Set the places of all ranks in the layout, which an initialized engine has; ``None`` without an engine."""
        # New processes may be on nodes that do not share the same folders.
        if self.generation != self.executor.generation:
            self._shared.clear()
        self._rank_layouts, self.generation = rank_layouts, self.executor.generation

    def leave_devices(self) -> None:
        """Leave shared devices: nothing of the engine is left on them."""
        place, self.place = self.place, None
        if place is not None:
            place.remove()

    @property
    def started(self) -> bool:
        """True if the engine is initialized in processes that live."""
        return (
            self._rank_layouts is not None
            and self.executor.lost is None
            and self.generation == self.executor.generation
        )

    def require_rank_layouts(self) -> list[RankLayout]:
        """Return the places of all ranks.

        Raises:
            WorkerLostError: a process is lost.
            RuntimeError: the engine is not initialized, or its processes were closed.
        """
        if self.executor.lost is not None:
            raise refusal(f"{_LOST}: {self.executor.lost}", self.executor.lost) from self.executor.lost
        if self._rank_layouts is None:
            raise RuntimeError(_NOT_INITIALIZED)
        if self.generation != self.executor.generation:
            raise RuntimeError(f"{_LOST}: its processes were replaced")
        return self._rank_layouts

    # ---- a member of the interface

    def start_member(self, name: str, arguments: dict[str, Any]) -> Pending[Any]:
        """Call a member on all ranks, as its row of the table says.

        Args:
            name: as in the table.
            arguments: by name.

        Raises:
            ValueError: an argument cannot be sent, or the member returns no future.
        """
        row = TABLE[name]
        use = row.use_with(arguments)
        self.require_rank_layouts()
        if row.sent is Sent.SHARDS:
            return self._start_on_shards(name, row, arguments, use)
        if row.sent is Sent.MICROBATCHES:
            return self._start_on_microbatches(name, row, arguments, use)
        if row.returned is Returned.RANKS:
            return self.start(name, self.verb(name, arguments, row.returned), of_all_ranks, use=use)
        if row.returned is not Returned.RANK_0:
            raise ValueError(f"{name} has no future: call it itself")
        return self.start(name, self.verb(name, arguments, row.returned), rank_0, use=use)

    def _start_on_shards(self, name: str, row: Route, arguments: dict[str, Any], use: Use | None) -> Pending[Any]:
        spec: MicroBatchSpec | None = arguments.pop("mb_spec", None)
        batch = arguments.pop("batch")
        plan, shards = self.shards(batch, computed_outputs(arguments), spec)
        mains = self.mains()
        if spec is not None:
            arguments["mb_spec"] = spec = of_a_rank(spec)
        if row.returned is Returned.LAYOUT:
            key = self.new_key("microbatches")
            work = partial(rank_calls.keep_microbatches, self.name, key, spec)
            return self.start(name, work, lambda values: self._kept(plan, at(mains, values), key), shards)
        verb = self.verb(name, arguments, row.returned)
        if row.returned is Returned.SAMPLES:
            call = CallResults(self.executor)

            def keep(result: Any, handles: list[Handle | None]) -> None:
                if not self.executor.in_driver:
                    keep_results(batch, plan.indices, at(mains, handles), result, call)

            return self.start(name, verb, lambda values: plan.merge(at(mains, values)), shards, use=use, keep=keep)
        return self.start(name, verb, lambda values: plan.merge_steps(at(mains, values)), shards, use=use)

    def _kept(self, plan: ShardPlan, values: list[Any], key: str) -> RemoteMicroBatches:
        mbs = joined_layouts(plan, values, key)
        weakref.finalize(mbs, self._unused.append, key)
        return mbs

    def _start_on_microbatches(self, name: str, row: Route, arguments: dict[str, Any], use: Use | None) -> Pending[Any]:
        mbs = arguments.pop("mbs")
        if not isinstance(mbs, RemoteMicroBatches):
            raise ValueError(f"mbs is a {type(mbs).__name__}: pass what microbatches() of this group returned")
        work = partial(rank_calls.on_microbatches, self.verb(name, arguments, row.returned), mbs.key)
        # Each coordinate returns the results of its micro-batches.
        if row.returned is Returned.MICROBATCHES:
            mains = self.mains()
            return self.start(name, work, lambda values: of_all_ranks(at(mains, values)), use=use)
        return self.start(name, work, rank_0, use=use)

    # ---- what is sent

    def shards(
        self, batch: BatchInput, outputs: Outputs = DEFAULT_OUTPUTS, mb_spec: MicroBatchSpec | None = None
    ) -> tuple[ShardPlan, list[Handle]]:
        """Check a batch, divide it by data-parallel coordinate, and store each shard once.

        Args:
            batch: global batch.
            outputs: per-token outputs that the call computes.
            mb_spec: rules of the call; ``None`` for those of the configuration.

        Returns:
            The plan, and the handle of each rank.

        Raises:
            ValueError: the batch or an output is invalid, with the text of an engine's error. Nothing was sent.
        """
        rank_layouts, spec = self.require_rank_layouts(), mb_spec or self.config.mb_spec
        if self.executor.in_driver:
            # The engine checks the batch in this process.
            plan = ShardPlan((batch,), spec)
        else:
            rules, n = rank_layouts[0].rules, 1 + max(rank_layout.dp_rank for rank_layout in rank_layouts)
            check = None if rules is None else partial(rules.cutting_by(mb_spec).plan, outputs=outputs, trees=False)
            plan = plan_shards(batch, spec, n, check=check)
        # Tensors that were put are not sent again.
        readers = Counter(rank_layout.dp_rank for rank_layout in rank_layouts)
        handles = [put_shard(shard, self.executor, readers[dp_rank]) for dp_rank, shard in enumerate(plan.shards)]
        return plan, [handles[rank_layout.dp_rank] for rank_layout in rank_layouts]

    def verb(self, path: str, arguments: Mapping[str, Any], returned: Returned) -> Verb:
        """Return the work that calls a member of the engine. Functions among the arguments are shipped.

        Raises:
            ValueError: a function cannot be sent.
        """
        shipped = {
            name: Argument(self.executor.ship(value, name))
            if callable(value) or isinstance(value, LossObjective)
            else value
            for name, value in arguments.items()
        }
        return Verb(self.name, path, shipped, returned)

    def function(self, function: Callable[..., Any], returned: Returned) -> Work:
        """Return the work that calls the caller's function."""
        shipped = self.executor.ship(function, getattr(function, "__name__", "fn"))
        return partial(rank_calls.call_function, self.name, shipped, returned)

    # ---- objects that stay on the ranks

    def new_key(self, kind: str) -> str:
        """Return a key for an object that stays on the ranks."""
        return f"{self.name}/{kind}/{next(self._numbers)}"

    def drop(self, key: str) -> None:
        """Drop an object on the ranks."""
        self.executor.start("drop", partial(rank_calls.drop, (key,)), [None] * self.executor.size)

    def _drop_unused(self) -> None:
        with self._lock:
            keys = tuple(self._unused)
            del self._unused[: len(keys)]
        if keys and self.started:
            self.executor.start("drop", partial(rank_calls.drop, keys), [None] * self.executor.size)

    # ---- streams and contexts

    def stream(self, path: str, **arguments: Any) -> Iterator[NamedTensor]:
        """Iterate over a stream of tensors on all ranks, and return that of rank 0 in chunks. Left early, it is closed on all ranks.

        Args:
            path: member that returns the stream.
            arguments: those that are not ``None``.

        Raises:
            ValueError: a function among the arguments cannot be sent.
        """
        self.require_rank_layouts()
        key, use = self.new_key("stream"), TABLE[path].use_with({})
        nbytes = min(STREAM_BYTES, self.executor.max_result_bytes // 2)
        given = {name: value for name, value in arguments.items() if value is not None}
        verb = self.verb(path, given, Returned.RANK_0)
        self.run(path, partial(rank_calls.open_stream, verb, key), use=use)
        return RemoteStream(
            partial(self._begin, use),
            lambda: self.run(path, partial(rank_calls.next_tensors, key, nbytes))[0],
            lambda: self.started and self.run(path, partial(rank_calls.drop, (key,))),
            in_driver=self.executor.in_driver,
        )

    def _begin(self, use: Use | None, *, call: bool = False) -> Turn | None:
        """Begin a use on shared devices. Elsewhere the state of the engine does not move."""
        return None if use is None or self.place is None else self.place.begin(use, call=call)

    @contextmanager
    def context(
        self, path: str, arguments: Mapping[str, Any], ranks: Sequence[int] | None = None
    ) -> Iterator[list[Any]]:
        """Enter a context on all ranks, and leave it, also after an error. Its values are by rank, and ``None`` without.

        Args:
            path: member that returns the context.
            arguments: by name.
            ranks: ranks that enter it; ``None`` for all.

        Raises:
            ValueError: there is no such rank.
        """
        size = len(self.require_rank_layouts())
        unknown = [rank for rank in ranks or () if not 0 <= rank < size]
        if unknown:
            raise ValueError(f"ranks = {ranks}: there is no rank {unknown[0]}; ranks are from 0 to {size - 1}")
        key = self.new_key("context")
        chosen = None if ranks is None else frozenset(ranks)
        try:
            # A rank that fails to enter it leaves it open on the others.
            verb = self.verb(path, arguments, TABLE[path].returned)
            yield self.run(path, partial(rank_calls.enter_context, verb, key, chosen))
        finally:
            if self.started:
                self.run(path, partial(rank_calls.exit_context, key))

    # ---- folders

    def check_shared(self, folder: str | Path) -> None:
        """Check once that a folder is the same for the driver and all ranks, by a file that each looks for.

        Raises:
            ValueError: a rank does not see the file. Names the rank and its host.
        """
        folder = Path(folder).absolute()
        if folder in self._shared:
            return
        # The deepest folder that exists: a rank may not make the rest of the path while another looks for it.
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        with tempfile.NamedTemporaryFile(prefix=".areal-shared-", dir=existing) as probe:
            seen = self.run("check_shared", partial(rank_calls.sees, Path(probe.name)))
        blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]
        if blind:
            raise ValueError(
                f"{existing} is another folder for the driver on {socket.gethostname()} than for {', '.join(blind)}, so that a checkpoint in "
                f"{folder} would be in parts: name a folder of a file system that all nodes share"
            )
        self._shared.add(folder)

    # ---- what is returned

    def mains(self) -> list[int]:
        """Return the ranks that have the outputs, by data-parallel coordinate. The result of a call outlives the engine's layout."""
        layouts = self.require_rank_layouts()
        return sorted((rank for rank, its in enumerate(layouts) if its.is_main), key=lambda rank: layouts[rank].dp_rank)


def computed_outputs(arguments: Mapping[str, Any]) -> Outputs:
    """Return the per-token outputs of a verb with a batch, after the checks that an engine makes of the other arguments.

    Args:
        arguments: arguments of the verb that the caller gave, by name.

    Raises:
        ValueError: an argument is invalid, with the text of an engine's error.
    """
    if "loss_fn" not in arguments:
        return arguments.get("outputs", DEFAULT_OUTPUTS)
    return LossCall.of(**arguments).outputs


def at(ranks: Sequence[int], values: Sequence[T]) -> list[T]:
    """Return the values of some ranks."""
    return [values[rank] for rank in ranks]


def of_all_ranks(values: Sequence[list[T]]) -> list[T]:
    """Return what the ranks have, in one list."""
    return [value for each in values for value in each]


def rank_0(values: Sequence[T]) -> T:
    """Return the value of rank 0."""
    return values[0]
