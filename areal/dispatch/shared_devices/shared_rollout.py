"""A rollout on shared devices: awake while it generates and while weights are sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from areal.api import NamedTensor
from areal.dispatch.shared_devices.place import Place
from areal.dispatch.shared_devices.turns import Turn
from areal.dispatch.shared_devices.uses import Use
from areal.utils.data.image_prompt import Prompt


class Sleeper(Protocol):
    """A rollout that can free its device memory."""

    @property
    def asleep(self) -> bool:
        """True if the memory is free."""
        ...

    def sleep(self) -> None:
        """Free the memory. Nothing is lost but the cache of keys and values."""
        ...

    def wake(self) -> None:
        """Take the memory back."""
        ...


class SharedRollout:
    """Generates and takes weights like a rollout, which is awake then. It falls asleep when others need its memory.

    Args:
        rollout: a rollout that was added to shared devices.
        place: its place there.
    """

    def __init__(self, rollout: Any, place: Place) -> None:
        self._rollout, self._place = rollout, place

    @property
    def owns_servers(self) -> bool:
        """Whether the rollout of this rank generates."""
        return bool(getattr(self._rollout, "owns_servers", True))

    @property
    def client(self) -> SharedRollout | None:
        """This rollout on the rank that generates, ``None`` on others."""
        return self if self.owns_servers else None

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""
        return self._rollout.version

    async def generate(self, prompt_ids: Prompt, sampling: Any) -> Any:
        """Generate an answer, as the rollout does. Waits while others need its memory, and others wait for the answer.

        Raises:
            ValueError: the rollout does not fit next to a use that waits for this answer; or see the rollout.
        """
        async with self._awake():
            return await self._rollout.generate(prompt_ids, sampling)

    async def prompt_logprobs(self, prompt_ids: Sequence[int], sampling: Any) -> Any:
        """Return the log-probs of a prompt's tokens, for a rollout that does. Waits as :meth:`generate`."""
        async with self._awake():
            return await self._rollout.prompt_logprobs(prompt_ids, sampling)

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Context of one request to the rollout."""
        turn = self._place.turn(Use.GENERATE, background=True)
        try:
            # A wait, or a move, must not block the event loop: running answers would not end.
            if self._rollout.asleep or not turn.begin_now():
                await _begin_in_thread(turn)
            yield
        finally:
            turn.end()

    def update(self, tensors: Iterator[NamedTensor], version: int, **options: Any) -> None:
        """Copy new weights into the rollout. The iterator is always exhausted, because it may be collective.

        Args:
            tensors: full tensors under Hugging Face names.
            version: version of these weights.
            options: options of the rollout's own ``update``.

        Raises:
            ValueError, RuntimeError: see the rollout.
        """
        try:
            with self._place.use(Use.GENERATE):
                self._rollout.update(tensors, version, **options)
        finally:
            for _ in tensors:
                pass

    def sync(self, engine: Any, version: int) -> None:
        """Send an engine's weights, for a rollout that takes them of an engine.

        Args:
            engine: as for the rollout's own ``sync``.
            version: version of these weights.
        """
        with self._place.use(Use.GENERATE):
            self._rollout.sync(engine, version)

    def load(self, folder: str | Path, version: int) -> None:
        """Load weights from a directory, for a rollout that does.

        Args:
            folder: as for the rollout's own ``load``.
            version: version of these weights.
        """
        with self._place.use(Use.GENERATE):
            self._rollout.load(folder, version)

    @property
    def asleep(self) -> bool:
        """True if the memory is free."""
        return self._rollout.asleep

    def sleep(self) -> None:
        """Free the memory now. The next answer or update takes it back."""
        with self._place.use(Use.CHANGE):
            self._rollout.sleep()

    def wake(self) -> None:
        """Take the memory back now, where there is room or others can leave."""
        with self._place.use(Use.GENERATE):
            pass

    def close(self) -> None:
        """Close the rollout, and remove it from the devices. May be called twice."""
        self._rollout.close()
        self._place.remove()


async def _begin_in_thread(turn: Turn) -> None:
    """Begin a use in another thread. A cancelled task leaves no thread that waits."""
    beginning = asyncio.ensure_future(asyncio.to_thread(turn.begin))
    try:
        await asyncio.shield(beginning)
    except asyncio.CancelledError:
        turn.end()
        await asyncio.wait({beginning})
        raise
