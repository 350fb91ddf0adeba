"""Plays episodes while the trainer trains, never further ahead of it than the staleness allows.

Groups are numbered as they start, and consumed in that order. With ``B`` groups to a batch and a staleness of ``k``, group ``j`` starts
once ``j < (t + k + 1) * B``, where ``t`` batches were trained on; batch ``b`` holds groups ``b * B`` to ``(b + 1) * B - 1`` and is trained on
when ``t = b``. So no group is trained on more than ``k`` updates after it started, whatever the speeds are, and with ``k = 0`` a run is the
same each time.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from areal.trainer.rollout.plan import Group, Items, Keep, Plan
from areal.trainer.rollout.protocol import Episode, RolloutClient, Sequence
from areal.trainer.rollout.seeded import SeededClient
from areal.utils.seeding import mixed


class Runner:
    """Plays episodes in a thread of its own, which begins with :meth:`advance`. This rank plays every ``size``-th group, from ``rank``.

    A batch holds the same items with the same seeds on any number of ranks, unless ``keep`` replaces some.

    Args:
        client: what episodes talk to.
        episode: played ``group_size`` times for each item.
        items: gone through again and again.
        plan: how much.
        keep: replaces groups that it is false for. A group without any sequence is always kept, and counted as failed.
        rank, size: of those who share the work.
    """

    def __init__(
        self,
        client: RolloutClient,
        episode: Episode,
        items: Items,
        plan: Plan,
        *,
        keep: Keep | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        if not len(items):
            raise ValueError("items is empty: pass at least one")
        self._client, self._episode, self._items, self.plan, self._keep = client, episode, items, plan, keep
        self.rank, self.size = rank, size
        self._trained = 0
        self._next = 0  # of this rank's groups, counted from 0
        self._consumed = 0  # groups handed out
        self._rejected = 0  # and those that gave their place to another, since the run began
        self._running = 0
        self._finished: dict[int, Group | None] = {}  # by number among this rank's; None was not kept
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._closed = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
        self._thread.start()

    @property
    def per_batch(self) -> int:
        """Groups that this rank plays for each batch."""
        return len(range(self.rank, self.plan.groups, self.size))

    def position(self, index: int) -> int:
        """Where in its batch a group stands, from 0; where groups were replaced, where the one that it replaces stood."""
        return index % self.plan.groups

    # ---- the trainer's side

    def advance(self, trained: int) -> None:
        """Say how many batches were trained on, the weights that came of them being served; starts what that allows."""
        with self._changed:
            self._trained = trained
        self._loop.call_soon_threadsafe(self._start_allowed)

    def next_batch(self, timeout: float | None = None) -> list[Group]:
        """This rank's groups of the next batch, in order; waits for them.

        Raises:
            TimeoutError: they are not there after ``timeout`` seconds.
            RuntimeError: the runner is closed, or an item or ``keep`` raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready() is not None or self._fault or self._closed, timeout):
                raise TimeoutError(f"no batch after {timeout} s: {self._running} groups are being played")
            if self._fault is not None:
                raise RuntimeError(f"a group could not be played: {self._fault}") from self._fault
            taken = self._ready()
            if taken is None or self._closed:
                raise RuntimeError("the runner is closed")
            groups = [group for number in taken if (group := self._finished.pop(number)) is not None]
            self._consumed = taken[-1] + 1 if taken else self._consumed
        return groups

    def _ready(self) -> list[int] | None:
        """The numbers of what the next batch consumes, those not kept included; ``None`` when it is not there yet."""
        numbers: list[int] = []
        kept = 0
        while kept < self.per_batch:
            number = self._consumed + len(numbers)
            if number not in self._finished:
                return None
            numbers.append(number)
            kept += self._finished[number] is not None
        return numbers

    def drain(self) -> list[Group | None]:
        """Start nothing more, wait for what is being played, and give what is not consumed yet; then go on."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: self._running == 0)
            waiting = [self._finished[number] for number in sorted(self._finished)]
            self._draining = False
        self._loop.call_soon_threadsafe(self._start_allowed)
        return waiting

    def close(self) -> None:
        """Cancel what is being played. May be called twice."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's share of the run is, with what was played and not consumed. Waits for what is being played."""
        waiting = [group if group is None else group.state() for group in self.drain()]
        return {"trained": self._trained, "consumed": self._consumed, "rejected": self._rejected, "waiting": waiting}

    def resharded_state(self, trained: int, played: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank in a run that was saved on other ranks and has replaced nothing.

        Args:
            played: groups that wait to be consumed, by their number in the run. What stands behind a gap is played again.
        """
        consumed = number = trained * self.per_batch
        waiting = []
        while self.per_batch and self._index(number) in played:
            waiting.append(played[self._index(number)])
            number += 1
        return {"trained": trained, "consumed": consumed, "rejected": 0, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with the same rank and size. To be called before the first :meth:`advance`."""
        with self._changed:
            self._trained, self._consumed, self._rejected = state["trained"], state["consumed"], state["rejected"]
            waiting = [group if group is None else Group.of_state(group) for group in state["waiting"]]
            self._finished = dict(enumerate(waiting, start=self._consumed))
            self._next = self._consumed + len(waiting)

    # ---- the loop's side

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))

    def _start_allowed(self) -> None:
        with self._changed:
            allowed = (self._trained + self.plan.max_staleness + 1) * self.per_batch + self._rejected
            room = max(1, self.plan.max_concurrent // self.plan.group_size)
            stopped = self._draining or self._closed or self._fault is not None
            while not stopped and self._next < allowed and self._running < room:
                task = self._loop.create_task(self._play(self._next))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._next += 1
                self._running += 1

    async def _play(self, number: int) -> None:
        group, fault = None, None
        try:
            group = await self._play_group(self._index(number))
            if group.sequences and self._keep is not None and not self._keep(list(group.sequences)):
                group = None
        except Exception as error:
            fault = error
        with self._changed:
            self._finished[number] = group
            self._fault = self._fault or fault
            self._rejected += group is None
            self._running -= 1
            self._changed.notify_all()
        self._start_allowed()

    def _index(self, number: int) -> int:
        """The number in the run of this rank's group."""
        batch, place = divmod(number, self.per_batch)
        return batch * self.plan.groups + place * self.size + self.rank

    async def _play_group(self, index: int) -> Group:
        item = self._item(index)
        clients = [SeededClient(self._client, (self.plan.seed, index, i)) for i in range(self.plan.group_size)]
        played = await asyncio.gather(*(self._timed(client, item) for client in clients), return_exceptions=True)
        errors = [found for found in played if isinstance(found, BaseException)]
        sequences = [sequence for found in played if not isinstance(found, BaseException) for sequence in found]
        return Group(
            index,
            tuple(replace(sequence, group=index) for sequence in sequences),
            failed=len(errors),
            error=f"{type(errors[0]).__name__}: {errors[0]}" if errors else None,
        )

    async def _timed(self, client: RolloutClient, item: Any) -> list[Sequence]:
        async with asyncio.timeout(self.plan.episode_seconds):
            sequences = await self._episode.run(client, item)
        for sequence in sequences:
            sequence.sample()  # what is wrong with one fails its episode, not the run
        return sequences

    def _item(self, index: int) -> Any:
        epoch, place = divmod(index, len(self._items))
        return self._items[
            _order(mixed(self.plan.seed, epoch), len(self._items))[place] if self.plan.shuffle else place
        ]


@functools.lru_cache(maxsize=2)
def _order(seed: int, length: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
