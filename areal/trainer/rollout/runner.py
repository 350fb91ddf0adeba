"""Runs episodes while the trainer trains, with bounded staleness.

:mod:`areal.trainer.rollout.order` decides which groups begin, and of which a batch consists. No token is trained on more than
``Plan.max_staleness`` updates after it was sampled, regardless of speeds. With 0 a run is reproducible.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import logging
import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch.distributed as dist

from areal.inference.protocol import RolloutClient
from areal.trainer.rollout.call_pool import in_time
from areal.trainer.rollout.episodes import Episode
from areal.trainer.rollout.order import NOTHING_PLAYED, Share, equal_counts, order_of, position_of, resharded
from areal.trainer.rollout.plan import Group, Items, Keep, Plan
from areal.trainer.rollout.seeded import SeededClient
from areal.trainer.rollout.sequence import Sequence

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0
"""Shortest time between two lines of the log about rejected groups, or about failed episodes."""


class Runner:
    """Runs episodes in a separate thread. The first call of :meth:`advance` starts them.

    This rank runs every ``size``-th group of a batch, starting with number ``rank``. A batch has the same items and seeds on any number of
    ranks, unless ``keep`` replaces groups. With ``Plan.in_order=False`` and a staleness, ranks whose groups are complete give more of them to a
    batch than others, and play more of the run.

    One rank can run all groups, for example if it owns all inference servers. On this rank, ``max_concurrent`` limits the episodes of the
    whole run, and all rewards are computed there: see :class:`~areal.trainer.rollout.rewards.RewardPool`.

    Args:
        client: generates the answers. ``None``, or a rollout whose ``owns_servers`` is false: no episode runs on this rank.
        episode: run ``group_size`` times per item.
        items: data set, iterated epoch after epoch. Not read on a rank that runs no episode.
        plan: size of a batch, limits and seeds.
        keep: returns False for groups to replace, at most ``Plan.max_rejected`` for each group of a batch. A group without sequences is
            always kept, and counted as failed.
        rank: index of this rank among those that run episodes; -1 on others. By default a trainer sets it; without a trainer it is the rank
            in the world.
        size: number of ranks that run episodes, by default those of the world. Pass both or neither.

    Attributes:
        plays: True if this rank runs episodes.

    Raises:
        ValueError: ``items`` is empty, or ``rank`` is not one of ``size``.
    """

    NOTHING_PLAYED: ClassVar[dict[str, Any]] = NOTHING_PLAYED
    """State of a run before its first batch."""

    def __init__(
        self,
        client: RolloutClient | None,
        episode: Episode,
        items: Items,
        plan: Plan,
        *,
        keep: Keep | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self.plays = client is not None and getattr(client, "owns_servers", True)
        if self.plays and not len(items):
            raise ValueError("items is empty: pass at least one")
        self._client = cast(RolloutClient, client)  # used to play a group, which a rank without a client never does
        self._episode, self._items, self.plan, self._keep = episode, items, plan, keep
        self._place: tuple[int, int] | None = None
        if rank is not None or size is not None:
            self.set_place(rank, size)
        self._trained = 0
        self._order = order_of(plan)
        # Guards everything above, and is notified when a group ends or the runner closes.
        self._changed = threading.Condition()
        # Episodes run as tasks on an event loop in a thread of this runner.
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[None], int] = {}  # with the numbers of their groups
        self._waits = True  # for advance, after which weights of the state are in use
        self._life = 0  # number of states that were loaded
        self._closed = False
        self._entering: asyncio.Future[Any] = self._loop.create_future()  # done once the episode was entered
        self._fault: Exception | None = None
        self._at_close = contextlib.ExitStack()
        # Counts for the log, and when each was logged last.
        self._lost: Counter[str] = Counter()
        self._logged: dict[str, float] = {}
        self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
        if self.plays:
            self._thread.start()

    @property
    def place(self) -> tuple[int, int] | None:
        """Rank and size, once they were passed or set."""
        return self._place

    def set_place(self, rank: int | None, size: int | None) -> None:
        """Set the groups that this rank runs: every ``size``-th, from number ``rank``. Call it before the first :meth:`advance`.

        Raises:
            ValueError: ``rank`` is not one of ``size``.
        """
        # Without a client, a trainer compares any rank with those of the other runners, so that the error is raised on all ranks.
        if rank is None or size is None or not (0 if self.plays else -1) <= rank < size:
            raise ValueError(f"Runner: rank = {rank}, size = {size}: pass both, with 0 <= rank < size, or neither")
        self._place = (rank, size)

    @property
    def rank(self) -> int:
        """Index of this rank among those that run episodes; -1 without a client."""
        return (self._place or _place_in_world())[0] if self.plays else -1

    @property
    def size(self) -> int:
        """Number of ranks that run episodes."""
        return (self._place or _place_in_world())[1]

    @property
    def per_batch(self) -> int:
        """Number of groups that this rank runs for each batch."""
        return self._share().per_batch if self.plays else 0

    def _share(self) -> Share:
        """Return which groups this rank plays."""
        return Share(self.rank, self.size, self.plan.groups)

    # ---- called by the trainer's thread

    def advance(self, trained: int) -> None:
        """Set the number of batches trained on, and start the groups that this allows. Call it after the new weights are in use.

        Args:
            trained: number of batches.
        """
        self._place = (self.rank, self.size)  # from here on, indices of groups depend on it
        with self._changed:
            self._trained, self._waits = trained, False
        self._soon(self._start_allowed)

    def complete_groups(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until a group ends, for at most ``seconds``, and return those that the next batch could have from this rank, in this order.

        Returns:
            Number of batches trained on when each group began, and its index. At most as many groups as a batch has.

        Raises:
            RuntimeError: as in :meth:`next_batch`.
        """
        share = self._share()
        with self._changed:
            if seconds and self.plays and self._fault is None and not self._closed:
                self._changed.wait(seconds)
            self._raise_if_over()
            numbers = self._order.complete()[: self.plan.groups]
            return [(self._order.waiting[number].begun, share.index(number)) for number in numbers]

    def next_batch(
        self, timeout: float | None = None, counts: collections.abc.Sequence[int] | None = None
    ) -> list[Group]:
        """Wait for this rank's groups of the next batch, and return them in order. Without a client, there are none.

        Args:
            timeout: seconds to wait; ``None`` waits without limit.
            counts: how many groups each rank that runs episodes gives to the batch. By default :attr:`per_batch` of each.

        Raises:
            TimeoutError: the groups are not complete after ``timeout`` seconds.
            RuntimeError: the runner is closed, an item or ``keep`` raised, or ``keep`` rejected too many groups.
        """
        counts = equal_counts(self.size, self.plan.groups) if counts is None else counts
        count = counts[self.rank] if self.plays else 0

        def is_over() -> bool:
            return self._order.select(count) is not None or self._fault is not None or self._closed

        with self._changed:
            if self.plays and not self._changed.wait_for(is_over, timeout):
                raise TimeoutError(f"no batch after {timeout} s: {len(self._order.running)} groups are being played")
            self._raise_if_over()
            groups, late = (self._order.take(count) if self.plays else None) or ([], [])
        # A rank that gave more than its share begins others with the next step: until then other ranks have as many more left.
        if late:
            self._soon(lambda: self._cancel(frozenset(late)))
        # Not from the index: replacements have indices of later batches.
        return [replace(each, position=position_of(i, self.rank, counts)) for i, each in enumerate(groups)]

    def _raise_if_over(self) -> None:
        """Raise a ``RuntimeError`` if no further batch can be had."""
        if self._fault is not None:
            raise RuntimeError(f"a group could not be played: {self._fault}") from self._fault
        if self._closed:
            raise RuntimeError("the runner is closed")

    def at_close(self, function: Callable[[], object]) -> None:
        """Call ``function`` when the runner is closed."""
        self._at_close.callback(function)

    def close(self) -> None:
        """Cancel the running episodes and stop the thread. May be called twice."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._soon(self._loop.stop)
        if self.plays:
            self._thread.join()
        self._loop.close()
        getattr(self._episode, "close", lambda: None)()
        self._at_close.close()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's runner, including groups not consumed yet. Does not wait for groups that are being played: a run that
        goes on from the state plays them again, with the same seeds.
        """
        with self._changed:
            state = {"trained": self._trained} | self._order.state()
        order = {"order": self.plan.order(len(self._items))} if self.plays else {}  # others may not know the items
        waiting = [group.state() if isinstance(group, Group) else group for group in state["waiting"]]
        return state | order | {"waiting": waiting}

    def resharded_state(self, states: collections.abc.Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return this rank's state for a run that was saved on another number of ranks, from the states of all of them."""
        return resharded(states, self._share(), self.plan)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if a state of :meth:`state_dict` is of a run with another order of groups; see :meth:`Plan.check_order`."""
        if self.plays:
            self.plan.check_order(len(self._items), state.get("order", {}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, with the same rank and size. The next :meth:`advance` starts episodes.

        Episodes that are running are cancelled, and groups that are not in the state are discarded.
        """
        with self._changed:
            self._life, self._waits, self._fault = self._life + 1, True, None
            self._trained = state["trained"]
            self._order.load(state, self._share())
        # Before any that advance starts: the event loop runs its callbacks in order.
        self._soon(lambda: [task.cancel() for task in self._tasks])

    def _soon(self, callback: Callable[[], object]) -> None:
        """Call a function on the event loop, if this rank has episodes to run on it."""
        if self.plays:
            self._loop.call_soon_threadsafe(callback)

    # ---- run by the event loop

    def _serve(self) -> None:
        """Run the event loop until :meth:`close`, then cancel its tasks."""
        asyncio.set_event_loop(self._loop)
        opened = contextlib.AsyncExitStack()
        if isinstance(self._episode, contextlib.AbstractAsyncContextManager):
            # Its groups wait for this task.
            self._entering = self._loop.create_task(opened.enter_async_context(self._episode))
        else:
            self._entering.set_result(None)
        while True:
            try:
                self._loop.run_forever()
                break
            except SystemExit as error:  # of a task that an episode has started: the loop goes on
                self._set_fault(RuntimeError(f"a task of an episode raised SystemExit: {error}"))
        for task in (*self._tasks, self._entering):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, self._entering, return_exceptions=True))
        try:
            self._loop.run_until_complete(opened.aclose())
        except Exception:
            logger.exception("rank %d: the episode could not be left", self.rank)

    def _set_fault(self, fault: Exception) -> None:
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def _start_allowed(self) -> None:
        """Start the groups that staleness and concurrency allow."""
        with self._changed:
            room = max(1, self.plan.max_concurrent // self.plan.group_size)
            share = self._share()
            while not (self._waits or self._closed or self._fault) and len(self._order.running) < room:
                number = self._order.begin(self._trained, share)
                if number is None:
                    return
                task = self._loop.create_task(self._play(number, self._life))
                self._tasks[task] = number
                task.add_done_callback(self._tasks.pop)

    def _cancel(self, numbers: frozenset[int]) -> None:
        """Cancel groups that may not be trained on any more, and start others."""
        for task, number in self._tasks.items():
            if number in numbers:
                task.cancel()
        self._start_allowed()

    async def _play(self, number: int, life: int) -> None:
        """Run one group of this rank, and record it as finished, replaced or failed, unless another state was loaded or it was cancelled."""
        played: Group | float = math.nan
        fault: Exception | None = None
        try:
            await asyncio.shield(self._entering)
            played = group = await self._play_group(self._share().index(number))
            if group.sequences and self._keep is not None and not self._keep(list(group.sequences)):
                played = sum(sequence.reward for sequence in group.sequences) / len(group.sequences)
        except Exception as error:
            fault = error  # of an item or of `keep`: next_batch raises it
        with self._changed:
            if life != self._life or not self._order.end(number, played):
                return
            self._fault = self._fault or fault or self.plan.too_many_rejected(self._order.rejected, self.per_batch)
            self._changed.notify_all()
        self._log_lost(played)
        self._start_allowed()

    def _log_lost(self, played: Group | float) -> None:
        """Log rejected groups and failed episodes, at most once in a while."""
        lost = "groups rejected by keep=" if isinstance(played, float) else "episodes failed"
        count = 1 if isinstance(played, float) else played.failed
        if not count:
            return
        self._lost[lost] += count
        now = time.monotonic()
        if now - self._logged.get(lost, -math.inf) >= LOG_SECONDS:
            self._logged[lost] = now
            cause = "" if isinstance(played, float) else f"; the last with {played.error}"
            logger.warning("rank %d: %d %s so far%s", self.rank, self._lost[lost], lost, cause)

    async def _play_group(self, index: int) -> Group:
        """Run all episodes of one item concurrently."""
        item = self._items[self.plan.item_of(index, len(self._items))]
        # Seeds depend on the plan, the group and the episode only, not on the rank or on timing.
        clients = [SeededClient(self._client, (self.plan.seed, index, i)) for i in range(self.plan.group_size)]
        played = await asyncio.gather(*(self._run_episode(client, item) for client in clients), return_exceptions=True)
        errors = [result for result in played if isinstance(result, BaseException)]
        # Numbered, because the sequences of one episode are one member of the group.
        sequences = [
            replace(sequence, group=index, episode=number)
            for number, result in enumerate(played)
            if not isinstance(result, BaseException)
            for sequence in result
        ]
        return Group(
            index,
            tuple(sequences),
            failed=len(errors),
            error=f"{type(errors[0]).__name__}: {errors[0]}" if errors else None,
            traceback="".join(traceback.format_exception(errors[0])).rstrip() if errors else None,
        )

    async def _run_episode(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Run one episode within its time limit, and check its sequences."""
        seconds = self.plan.episode_seconds
        sequences = await in_time(
            self._episode.run(client, item),
            seconds,
            "episode",
            lambda: f"the episode took longer than Plan.episode_seconds = {seconds:g}",
        )
        for sequence in sequences:
            sequence.sample()  # an invalid sequence fails its episode, not the run
        return sequences


def _place_in_world() -> tuple[int, int]:
    """Return rank and size of the default process group, or of one process without it."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
