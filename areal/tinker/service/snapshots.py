"""Weights that the sampler has open: one copy for all sessions that use them, and a bounded number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from areal.tinker.backends.backend import SamplingBackend
from areal.tinker.backends.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Snapshot:
    name: str
    opening: asyncio.Task[None]
    running: int = 0

    def usable(self) -> bool:
        """Return whether the sampler serves it. The opening has ended."""
        return not self.opening.cancelled() and self.opening.exception() is None


class Snapshots:
    """Open weights by the id of their folder, ``None`` for the base model.

    Args:
        most: number of open snapshots above which those that were not used for longest are closed. Their next use reads them again.
    """

    def __init__(self, backend: SamplingBackend, most: int) -> None:
        self._backend = backend
        self._most = most
        self._open: OrderedDict[str | None, _Snapshot] = OrderedDict()
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def use(self, uid: str | None, folder: Path | None) -> AsyncIterator[str]:
        """Yield the sampler's name of weights, which it reads first if they are not open.

        Raises:
            UserError: the folder is missing or damaged.
        """
        snapshot = self._open.get(uid)
        if snapshot is None:
            # Each opening has its own name: an earlier one may still be closing.
            self._number += 1
            name = f"{uid or 'base'}-{self._number}"
            opening = asyncio.get_running_loop().create_task(self._read(name, folder))
            snapshot = self._open[uid] = _Snapshot(name, opening)
            self._close_unused()
        self._open.move_to_end(uid)
        snapshot.running += 1
        try:
            # A request that is cancelled must not stop the opening for others.
            await asyncio.shield(snapshot.opening)
            yield snapshot.name
        finally:
            snapshot.running -= 1
            # The next request tries again.
            if snapshot.opening.done() and not snapshot.usable() and self._open.get(uid) is snapshot:
                del self._open[uid]

    async def close(self, uid: str | None) -> None:
        """Let the sampler free weights."""
        snapshot = self._open.pop(uid, None)
        if snapshot is not None:
            await self._release(snapshot)

    async def stop(self) -> None:
        """Wait until closing weights are closed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _close_unused(self) -> None:
        """Close weights that were not used for longest. Clients create a snapshot per step and do not report when they are done with it."""
        idle = [uid for uid, snapshot in self._open.items() if not snapshot.running and snapshot.opening.done()]
        for uid in idle[: max(0, len(self._open) - self._most)]:
            # No request can begin to use them from here on.
            task = asyncio.get_running_loop().create_task(self._release(self._open.pop(uid)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, name: str, folder: Path | None) -> None:
        # After a restart, the weights of a session are gone if its checkpoint was deleted or overwritten meanwhile.
        if folder is not None and not await asyncio.to_thread(folder.is_dir):
            raise UserError(
                "the checkpoint of this sampling session was deleted or overwritten: create a new sampling client"
            )
        await self._backend.open(name, folder)

    async def _release(self, snapshot: _Snapshot) -> None:
        await asyncio.wait({snapshot.opening})
        if not snapshot.usable():
            return
        try:
            await self._backend.release(snapshot.name)
        except Exception:
            logger.exception("the snapshot %s could not be released", snapshot.name)
