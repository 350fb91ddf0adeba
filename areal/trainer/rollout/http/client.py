"""Rollout engine on HTTP servers."""

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
    """Rollout engine on one or more servers. Each server has a complete copy of the model and is used by this engine only.

    A request goes to the server with the fewest running requests. It is retried, on another server if there is one, after a failed
    connection, a timeout, or a status of 500 and above. A request that the server rejects (status 400 to 499) is not retried.

    An update writes the weights to ``folder``. Every server then pauses, loads them and resumes. Interrupted requests return the tokens
    generated so far, and are continued with these tokens as part of the prompt. Earlier tokens therefore have exactly the previous version
    and later ones the new version, and the new weights recompute all keys and values. Requests that do not return within ``drain_seconds`` of
    the pause are discarded and repeated. The tokens of one request always have one version, because no request spans an update.

    If a server reports a name of its weights (SGLang, from the first update on) and it differs from that of the last update, the server was
    restarted. It is excluded until the next update.

    ``generate`` may be awaited on any number of event loops. Requests are sent from an event loop in a thread of this engine.

    Args:
        urls: base URLs of the servers, such as ``http://host:30000``.
        dialect: kind of server; see its docstring for the options with which the servers must be started.
        folder: directory for weights only, which the servers can read under the same path.
        model: directory or hub name of the model, whose configuration is written with the weights. Needed only if servers are started from a
            version's directory.
        version: version of the weights that the servers have now.
        cast: dtype in which weights are written; ``None`` keeps each tensor's dtype.
        timeout: seconds for one request, including generation.
        deadline: seconds without a new token, over all attempts, after which an answer fails. With ``timeout``, it limits how long a hung
            server goes undetected.
        update_seconds: seconds for each step of an update on a server.
        drain_seconds: seconds for interrupted requests to return.

    Raises:
        ValueError: ``urls`` is empty or has duplicates, or a time is not above 0.
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
        server_urls = [urls] if isinstance(urls, str) else list(urls)
        if not server_urls or len(set(server_urls)) < len(server_urls):
            raise ValueError(f"urls = {server_urls}: give each server once, and at least one")
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
        self._servers = [Server(url, version) for url in server_urls]
        self._version = version
        self._changed = asyncio.Condition()  # notified when a server ends an update
        self._updating = threading.RLock()
        self._closed = self._asleep = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-http", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Oldest version among the servers. If no server's version is known, the last known one."""
        versions = [server.version for server in self._servers if server.version is not None]
        return min(versions, default=self._version)

    async def generate(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> Completion:
        """Generate an answer to a prompt. Cancelling the task aborts the request on the server.

        Raises:
            ValueError: the prompt is empty, the dialect does not support the sampling parameters, or the server rejects the request (for
                example, because it is too long).
            RuntimeError: the engine is closed or asleep, no attempt succeeded within ``deadline``, or a reply does not have the documented
                form. Names the server.
        """
        # Checked here, before a request is queued.
        self._check_awake()
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ValueError("prompt_ids is empty: an answer needs at least one token to go on from")
        if sampling.stop or sampling.top_logprobs:
            got = f"Sampling.stop = {sampling.stop}, Sampling.top_logprobs = {sampling.top_logprobs}"
            raise ValueError(f"{got}: servers are not asked for these: use stop_token_ids, or LocalRollout")
        self._dialect.check(sampling)
        return await asyncio.wrap_future(self._submit(self._answer(Answer(prompt, sampling))))

    def update(self, tensors: Iterator[NamedTensor], version: int) -> None:
        """Write new weights to ``folder``, and load them on all servers. The iterator is always exhausted, because it may be collective.

        Args:
            tensors: full tensors under Hugging Face names.
            version: version of these weights.

        Raises:
            ValueError: the weights cannot be written. The old weights stay in use.
            RuntimeError: see :meth:`load`.
        """
        try:
            with self._updating:
                self._check_awake()
                self._transport.send(_StreamSource(tensors), version)
        finally:
            for _ in tensors:
                pass
        self.load(self._folder / f"version-{version:08d}", version)

    def load(self, folder: str | Path, version: int) -> None:
        """Load weights from a directory on all servers.

        Args:
            folder: model directory as written by transformers, at a path that the servers can read.
            version: version of these weights.

        Raises:
            RuntimeError: a server did not load them; lists the version of each server. A server that still has its old version stays in
                use. One that may have loaded some of the new weights is excluded until the next update. Or the engine is asleep.
        """
        with self._updating:
            self._check_awake()
            faults = self._run(self._load_all(str(Path(folder).resolve()), version))
            if any(server.version == version for server in self._servers):
                self._version = version
        # All servers had their attempt; report what each one serves now.
        if any(faults):
            states = [
                f"{server.url} " + ("is left out" if server.version is None else f"serves version {server.version}")
                for server in self._servers
            ]
            raise RuntimeError(
                f"version {version} did not reach every server: {'; '.join(filter(None, faults))}. Now {', '.join(states)}"
            )

    @property
    def asleep(self) -> bool:
        """True between :meth:`sleep` and :meth:`wake`."""
        return self._asleep

    def sleep(self) -> None:
        """Free the device memory of all servers. Requests and updates raise until :meth:`wake`. May be called twice.

        Raises:
            RuntimeError: answers are running, or a server cannot sleep: then all servers are awake.
        """
        with self._updating:
            if not self._asleep and any(faults := self._run(self._sleep_all())):
                raise RuntimeError(f"not every server can sleep: {'; '.join(filter(None, faults))}")

    def wake(self) -> None:
        """Wake all servers. May be called twice.

        Raises:
            RuntimeError: a server did not wake up. It is excluded until the next update.
        """
        with self._updating:
            if self._asleep and any(faults := self._run(self._wake_all(self._servers))):
                raise RuntimeError(f"not every server has woken up: {'; '.join(filter(None, faults))}")

    def close(self) -> None:
        """End running requests with their tokens so far (``"aborted"``), and release thread and connections. May be called twice.

        Servers that are asleep stay asleep.
        """
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

    # ---- run by the engine's event loop

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        """Start a coroutine on the engine's event loop, from any thread."""
        if self._closed:
            work.close()
            raise RuntimeError("the rollout was closed: make another one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's event loop and wait for its result."""
        result: T = self._submit(work).result()
        return result

    async def _answer(self, answer: Answer) -> Completion:
        """Send requests until the answer is complete."""
        task = asyncio.current_task()
        if task is None or self._closed:
            raise RuntimeError("the rollout was closed: make another one")
        self._check_awake()
        self._tasks.add(task)
        try:
            while answer.finish is None:
                answer.add(*await self._next_reply(answer))
        except asyncio.CancelledError:
            if not self._closed:
                raise
            answer.finish = "aborted"
        finally:
            self._tasks.discard(task)
        return answer.completion()

    async def _next_reply(self, answer: Answer) -> tuple[ReplyPart, int]:
        """Return the next tokens of an answer and their version. Retries until an attempt returns a token, or the deadline passes."""
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
                reply = await self._send_request(server, answer, min(left, self._timeout))
            except Unavailable as error:
                fault = str(error)
                continue
            # Discarded by an update: ask again.
            if reply is None or version is None:
                continue
            # Weights of an unknown version: the server was restarted since the last update.
            if label is not None and reply.label is not None and reply.label != label:
                if server.label == label:
                    server.lose(f"{server.url} has weights {reply.label!r}, not version {version}: it was started anew")
                continue
            if reply.tokens or reply.finish == "length":
                return reply, version
            fault = f"{server.url} breaks off before the first token"
            await asyncio.sleep(0.05)

    async def _pick(self, answer: Answer) -> Server | None:
        """Return the open server with the fewest requests, preferring servers that are not backing off after a fault.

        Returns ``None`` if all back off beyond the deadline. The deadline is suspended while all servers are in an update.
        """
        while True:
            ready = self._ready()
            if not ready and self._all_open():
                raise RuntimeError(f"no server has known weights: {'; '.join(server.why for server in self._servers)}")
            # All are in an update: wait for the first that ends.
            if not ready:
                answer.deadline = None
                async with self._changed:
                    await self._changed.wait_for(lambda: self._ready() or self._all_open())
                continue
            now = time.monotonic()
            # Prefer servers that do not back off, then those with few requests.
            best = min(ready, key=lambda server: (max(server.backoff_until - now, 0.0), len(server.requests)))
            if best.backoff_until <= now:
                return best
            if answer.deadline is not None and best.backoff_until >= answer.deadline:
                return None
            await asyncio.sleep(best.backoff_until - now)

    def _ready(self) -> list[Server]:
        """Return the servers that accept requests and have weights of a known version."""
        return [server for server in self._servers if server.is_open and server.version is not None]

    def _all_open(self) -> bool:
        """Return True if no server is in an update."""
        return all(server.is_open for server in self._servers)

    async def _send_request(self, server: Server, answer: Answer, seconds: float) -> ReplyPart | None:
        """Send one request. Returns ``None`` if an update discarded it."""
        name = uuid.uuid4().hex
        call = self._dialect.generate(
            name, answer.prompt + answer.tokens, len(answer.tokens), answer.sampling, answer.seed
        )
        # A separate task, so that an update can cancel the request without cancelling the answer.
        request = self._loop.create_task(server.send(call, seconds))
        server.requests.add(request)
        try:
            await asyncio.wait({request})
        except asyncio.CancelledError:
            request.cancel()
            await asyncio.wait({request})
            abort = self._dialect.abort(name)
            if abort is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await asyncio.shield(server.send(abort, 1.0))
            raise
        finally:
            server.requests.discard(request)
        if request.cancelled():
            return None
        # The reply has the right form (the schema checked it); check that its content is possible.
        body: ReplyBody = request.result()
        try:
            reply = self._dialect.read_reply(body)
            if len(reply.tokens) > answer.sampling.max_new_tokens - len(answer.tokens):
                raise ValueError(f"{len(reply.tokens)} tokens came, which is more than were asked for")
            if reply.finish == "stop" and not reply.tokens:
                raise ValueError("it stopped at a token, and none came")
        except ValueError as error:
            raise RuntimeError(f"{server.url}{call.route}: the reply cannot be: {error}") from error
        return reply

    async def _load_all(self, folder: str, version: int) -> list[str]:
        """Load a version on all servers at once. Returns the error of each, or an empty string."""
        return await asyncio.gather(*(self._load_on(server, folder, version) for server in self._servers))

    async def _load_on(self, server: Server, folder: str, version: int) -> str:
        """Load a version on one server, and wake the requests that wait for one."""
        fault = await server.load_version(self._dialect, folder, version, self._update_seconds, self._drain_seconds)
        async with self._changed:
            self._changed.notify_all()
        return fault

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("the rollout is asleep: call wake() first")

    async def _sleep_all(self) -> list[str]:
        """Put all servers to sleep, or none. Returns the error of each, or an empty string."""
        if self._tasks:
            raise RuntimeError(f"{len(self._tasks)} answers are running: wait for them before sleep()")
        self._asleep = True
        faults = await asyncio.gather(*(each.sleep(self._dialect, self._update_seconds) for each in self._servers))
        if any(faults):
            await self._wake_all([each for each, fault in zip(self._servers, faults, strict=True) if not fault])
        return faults

    async def _wake_all(self, servers: Sequence[Server]) -> list[str]:
        """Wake servers. Returns the error of each, or an empty string."""
        faults = await asyncio.gather(*(each.wake(self._dialect, self._update_seconds) for each in servers))
        self._asleep = False
        return faults

    async def _close(self) -> None:
        """Cancel all answers, and close the connections."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.gather(*(server.close() for server in self._servers))


class _StreamSource:
    """A :class:`~areal.api.weights.TensorSource` that yields an existing iterator, once."""

    def __init__(self, tensors: Iterator[NamedTensor]) -> None:
        self._tensors = tensors

    def named_tensors(self) -> Iterator[NamedTensor]:
        return self._tensors
