"""Generation on servers that speak HTTP."""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from areal.api.weights import NamedTensor
from areal.trainer.rollout.http.answer import Answer
from areal.trainer.rollout.http.dialects import Dialect, ReplyPart
from areal.trainer.rollout.http.schemas import ReplyBody
from areal.trainer.rollout.http.server import Server, Unavailable
from areal.trainer.rollout.protocol import Completion, Sampling
from areal.utils.distributed import ControlPlane
from areal.weight_sync.disk import DiskTransport

T = TypeVar("T")


class HTTPRollout:
    """A rollout engine on one or more servers, each of which has the whole model, and is used by this engine alone.

    A request goes to the server with the fewest under way. One that finds no connection, no answer in time, or a status of 500 and above is
    sent again, to another server if there is one; what a server refuses (a status of 400 to 499) is not.

    An update writes the weights to ``folder``, lets every server break off, load them and go on; generation stands still from breaking off
    to going on. What is broken off comes back with the tokens that it has, and is asked for again with them as part of the prompt: so
    earlier tokens have the version before and later ones the version after, exactly, and all keys and values are computed anew by the later
    weights. What has not come back ``drain_seconds`` after a server was told to pause is thrown away and made anew. The tokens of
    one request always have one version: a request is sent and answered between two updates.

    Where a server calls its weights by name (SGLang, from its first update on), a reply under another name than that of the last
    update shows that the server was started anew; it is left out from then on until the next update.

    ``generate`` may be awaited on any number of event loops; the requests are made on one of this engine, in a thread of its own.

    Args:
        urls: of the servers, such as ``http://host:30000``.
        dialect: what kind they are; see there for how they must have been started.
        folder: on a file system that the servers see under the same path; for the weights alone.
        model: directory or hub name of the model, whose configuration is then written beside the weights. Servers need it only where they
            load a version from its start.
        version: of the weights that the servers have now.
        cast: dtype in which weights are written; ``None`` leaves each as it is.
        timeout: seconds in which a request must be answered; with ``deadline``, how long a server that hangs goes unnoticed.
        deadline: seconds after which an answer fails for which no attempt brought a token.
        update_seconds: most for each step of an update on a server.
        drain_seconds: as above.

    Raises:
        ValueError: there are no urls, or one twice; or a time is not above 0.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        dialect: Dialect,
        *,
        folder: str | Path,
        model: str | None = None,
        version: int = 0,
        cast: torch.dtype | None = None,
        timeout: float = 600.0,
        deadline: float = 1200.0,
        update_seconds: float = 600.0,
        drain_seconds: float = 10.0,
    ) -> None:
        places = [urls] if isinstance(urls, str) else list(urls)
        if not places or len(set(places)) < len(places):
            raise ValueError(f"urls = {places}: give each server once, and at least one")
        times = {
            "timeout": timeout,
            "deadline": deadline,
            "update_seconds": update_seconds,
            "drain_seconds": drain_seconds,
        }
        for name, value in times.items():
            if not value > 0:
                raise ValueError(f"{name} = {value}: it must be above 0 seconds")
        self._dialect, self._timeout, self._deadline = dialect, timeout, deadline
        self._update_seconds, self._drain_seconds = update_seconds, drain_seconds
        self._folder = Path(folder).resolve()
        self._transport = DiskTransport(ControlPlane(alone=True), self._folder, model=model, cast=cast)
        self._servers = [Server(url, version) for url in places]
        self._version = version
        self._changed = asyncio.Condition()
        self._updating = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-http", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The oldest of the versions that servers have now; where none is known, the last that was."""
        versions = [server.version for server in self._servers if server.version is not None]
        return min(versions, default=self._version)

    async def generate(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> Completion:
        """Continue a prompt. A cancelled task ends its request on the server.

        Raises:
            ValueError: the prompt is empty; the dialect cannot draw so; or the server refuses the request, such as for its length.
            RuntimeError: the engine was closed before, no attempt succeeded within ``deadline``, or a reply is not of the form that was
                written down. Names the server.
        """
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ValueError("prompt_ids is empty: an answer needs at least one token to go on from")
        self._dialect.check(sampling)
        return await asyncio.wrap_future(self._submit(self._answer(Answer(prompt, sampling))))

    def update(self, tensors: Iterator[NamedTensor], version: int) -> None:
        """Write new weights to the folder, and let every server load them. The iterator is always read to its end.

        Raises:
            ValueError: the weights cannot be written; the old ones then serve on. RuntimeError: as :meth:`load`.
        """
        try:
            with self._updating:
                self._transport.send(_Once(tensors), version)
        finally:
            for _ in tensors:
                pass
        self.load(self._folder / f"version-{version:08d}", version)

    def load(self, folder: str | Path, version: int) -> None:
        """Let every server load weights that were written before.

        Args:
            folder: of a model as transformers writes it, at a path that the servers see.

        Raises:
            RuntimeError: a server did not load them; says what each one has now. One that has its old version serves on with it; one that may
                have part of the new one is left out until the next update.
        """
        with self._updating:
            faults = self._run(self._renew_all(str(Path(folder).resolve()), version))
            if any(server.version == version for server in self._servers):
                self._version = version
        if any(faults):
            states = [
                f"{server.url} " + ("is left out" if server.version is None else f"serves version {server.version}")
                for server in self._servers
            ]
            raise RuntimeError(
                f"version {version} did not reach every server: {'; '.join(filter(None, faults))}. Now {', '.join(states)}"
            )

    def close(self) -> None:
        """End what is under way with what there is of it (``"aborted"``), and free thread and connections. May be called twice."""
        with self._updating:
            if self._closed:
                return
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- the thread's side

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        if self._closed:
            work.close()
            raise RuntimeError("the rollout was closed: make another one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self._submit(work).result()
        return result

    async def _answer(self, answer: Answer) -> Completion:
        task = asyncio.current_task()
        if task is None or self._closed:
            raise RuntimeError("the rollout was closed: make another one")
        self._tasks.add(task)
        try:
            while answer.finish is None:
                answer.add(*await self._piece(answer))
        except asyncio.CancelledError:
            if not self._closed:
                raise
            answer.finish = "aborted"
        finally:
            self._tasks.discard(task)
        return answer.completion()

    async def _piece(self, answer: Answer) -> tuple[ReplyPart, int]:
        """More of an answer, and the version that made it: attempts until one brings a token, or the deadline is over."""
        answer.deadline = None
        fault = "no server could be asked"
        while True:
            server = await self._pick(answer)
            if answer.deadline is None:
                answer.deadline = time.monotonic() + self._deadline
            left = answer.deadline - time.monotonic()
            if server is None or left <= 0:
                raise RuntimeError(f"no answer within {self._deadline:g} s; the last attempt: {fault}")
            version, label = server.version, server.label
            try:
                piece = await self._fly(server, answer, min(left, self._timeout))
            except Unavailable as error:
                fault = str(error)
                continue
            if piece is None or version is None:  # an update came between
                continue
            if label is not None and piece.label is not None and piece.label != label:
                if server.label == label:
                    server.lose(f"{server.url} has weights {piece.label!r}, not version {version}: it was started anew")
                continue
            if piece.tokens or piece.finish == "length":
                return piece, version
            fault = f"{server.url} breaks off before the first token"
            await asyncio.sleep(0.05)

    async def _pick(self, answer: Answer) -> Server | None:
        """The open server that has least to do, those without a fault just now first; ``None`` if there is none before the deadline, which
        does not run while an update does.
        """
        while True:
            ready = self._ready()
            if not ready and self._settled():
                raise RuntimeError(f"no server has known weights: {'; '.join(server.why for server in self._servers)}")
            if not ready:
                answer.deadline = None
                async with self._changed:
                    await self._changed.wait_for(lambda: self._ready() or self._settled())
                continue
            now = time.monotonic()
            best = min(ready, key=lambda server: (max(server.rests_until - now, 0.0), len(server.flights)))
            if best.rests_until <= now:
                return best
            if answer.deadline is not None and best.rests_until >= answer.deadline:
                return None
            await asyncio.sleep(best.rests_until - now)

    def _ready(self) -> list[Server]:
        return [server for server in self._servers if server.is_open and server.version is not None]

    def _settled(self) -> bool:
        return all(server.is_open for server in self._servers)

    async def _fly(self, server: Server, answer: Answer, seconds: float) -> ReplyPart | None:
        """One request; ``None`` where an update threw it away."""
        name = uuid.uuid4().hex
        call = self._dialect.generate(
            name, answer.prompt + answer.tokens, len(answer.tokens), answer.sampling, answer.seed
        )
        flight = self._loop.create_task(server.send(call, seconds))
        server.flights.add(flight)
        try:
            await asyncio.wait({flight})
        except asyncio.CancelledError:
            flight.cancel()
            await asyncio.wait({flight})
            abort = self._dialect.abort(name)
            if abort is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await asyncio.shield(server.send(abort, 1.0))
            raise
        finally:
            server.flights.discard(flight)
        if flight.cancelled():
            return None
        reply: ReplyBody = flight.result()
        try:
            piece = self._dialect.piece(reply)
            if len(piece.tokens) > answer.sampling.max_new_tokens - len(answer.tokens):
                raise ValueError(f"{len(piece.tokens)} tokens came, which is more than were asked for")
            if piece.finish == "stop" and not piece.tokens:
                raise ValueError("it stopped at a token, and none came")
        except ValueError as error:
            raise RuntimeError(f"{server.url}{call.route}: the reply cannot be: {error}") from error
        return piece

    async def _renew_all(self, folder: str, version: int) -> list[str]:
        return await asyncio.gather(*(self._renew(server, folder, version) for server in self._servers))

    async def _renew(self, server: Server, folder: str, version: int) -> str:
        fault = await server.renew(self._dialect, folder, version, self._update_seconds, self._drain_seconds)
        async with self._changed:
            self._changed.notify_all()
        return fault

    async def _close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.gather(*(server.close() for server in self._servers))


class _Once:
    """A stream of tensors as a source of them."""

    def __init__(self, tensors: Iterator[NamedTensor]) -> None:
        self._tensors = tensors

    def named_tensors(self) -> Iterator[NamedTensor]:
        return self._tensors
