"""Rollout engine on HTTP servers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from areal.api.control import Control
from areal.api.engine import TrainEngine
from areal.api.sections.quantization import QuantizationConfig
from areal.api.weights import NamedTensor
from areal.inference.http.answer import Answer
from areal.inference.http.clients.client_pool import ClientPool
from areal.inference.http.fleet import Fleet
from areal.inference.http.group.sender import Members
from areal.inference.http.group.transports import AnyCarrier
from areal.inference.http.label import Owner
from areal.inference.http.model_check import ModelCheck
from areal.inference.http.server import Server
from areal.inference.http.server_connection import Unavailable
from areal.inference.http.server_state import Serving, UpdateTimes, Updating
from areal.inference.http.servers.dialect import Dialect, ReplyPart
from areal.inference.http.updates import WeightUpdates
from areal.inference.protocol import Completion, Sampling, checked_prompt, without_media
from areal.inference.stop_strings import StopStrings
from areal.inference.together import gather_or_cancel
from areal.utils.data.image_prompt import ImagePrompt, Prompt
from areal.utils.distributed import ControlPlane

T = TypeVar("T")

_GROUP_SECONDS = 120.0
"""Maximum seconds of a step of an update over a process group. The other ranks wait in a collective of the engine meanwhile."""


class HTTPRollout:
    """Rollout engine on one or more servers. Each server has a complete copy of the model and is used by this engine only.

    A request goes to the server that has the longest prefix of its prompt, or that has the fewest requests. It is retried, on another server
    if there is one, after a failed connection, a status of 500 and above, and when a silent server is not healthy.

    An update writes the weights to ``folder``. Every server then pauses, loads them and resumes, and every token has the version that
    generated it. Servers that keep requests (SGLang, and vLLM with ``--enable-scale-out``) continue them with the new weights. Others, and
    all in an update of an adapter, return the tokens generated so far, and the request is continued with these tokens as part of the prompt;
    requests that do not return within ``drain_seconds`` of the pause are discarded and repeated. The new weights recompute all keys and values.

    Servers with labels of weights are given one that names this engine; that of another engine that lives is refused. A server that was
    started anew gets the current weights before its next token counts. One that cannot be reached gets no requests until it answers.

    With ``control``, all ranks make this engine, and the first one owns the servers: others connect to none, and generate nothing.
    ``sync``, ``update`` and ``load`` are collective then.

    ``generate`` may be awaited on any number of event loops. Requests are sent from an event loop in a thread of this engine.

    Args:
        urls: base URLs, such as ``http://host:30000``.
        dialect: kind of server; see its docstring for the options with which the servers must be started.
        folder: directory for weights only, which the servers can read under the same path. May be left out with a carrier.
        carrier: sends weights without files, such as :class:`~areal.inference.http.group.NCCLCarrier` over a process group with the servers'
            workers; adapters still go by ``folder``. ``None`` writes weights to ``folder``.
        control: control plane over the ranks of the trainer (``engine.control``); ``None`` if this process alone has the engine.
        model: directory or hub name of the model that servers must have. Its configuration is written with the weights, and its tokenizer
            finds stop strings. ``None`` compares the servers with each other.
        quantization: rounding of the trainer (``config.fsdp.quantization``), ``None`` if it does not round: so must the servers.
        version: version of the weights that the servers have now.
        max_requests: maximum number of requests that a server gets at once; further ones wait here. The number is found from its throughput
            (:class:`~areal.inference.http.concurrency_limit.ConcurrencyLimit`). ``None`` sends all requests at once.
        client_processes: number of processes that send requests and parse replies in place of this one, which does the rest; 0 for none.
        cast: dtype in which weights are written; ``None`` keeps each tensor's dtype.
        timeout: seconds without a reply after which a server is asked for its health. While it is healthy, a request may take any time.
        deadline: seconds without a new token or a healthy server, over all attempts, after which an answer fails.
        update_seconds: seconds for each step of an update on a server.
        drain_seconds: seconds for interrupted requests to return.
        api_key: key of the servers, sent as ``Authorization: Bearer``.
        take_over: use servers of another engine that may live. An engine whose process has ended needs no permission.

    Raises:
        ValueError: ``urls`` is empty or has duplicates, a time, ``max_requests`` or ``client_processes`` is out of range, or a server that
            can be reached is not started as needed, has another model or tokenizer, rounds in another way, or belongs to another engine.
            Raised on all ranks.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        dialect: Dialect,
        *,
        folder: str | Path | None = None,
        carrier: AnyCarrier | None = None,
        control: Control | None = None,
        model: str | None = None,
        quantization: QuantizationConfig | None = None,
        version: int = 0,
        max_requests: int | None = None,
        client_processes: int = 0,
        cast: torch.dtype | None = None,
        timeout: float = 600.0,
        deadline: float = 1200.0,
        update_seconds: float = 600.0,
        drain_seconds: float = 10.0,
        api_key: str | None = None,
        take_over: bool = False,
    ) -> None:
        server_urls = [urls] if isinstance(urls, str) else list(urls)
        if not server_urls or len(set(server_urls)) < len(server_urls):
            raise ValueError(f"urls = {server_urls}: give each server once, and at least one")
        if max_requests is not None and max_requests < 1:
            raise ValueError(f"max_requests = {max_requests}: a server needs at least 1; None sends all at once")
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
        self._control: Control = ControlPlane(alone=True) if control is None else control
        self._owner, self._model = Owner(take_over=take_over), ModelCheck(model, quantization)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

        def connect() -> tuple[ClientPool, list[Server]]:
            clients = ClientPool(client_processes if self.owns_servers else 0)  # other ranks make no connection
            connections = [clients.connection(url, headers) for url in server_urls if self.owns_servers]
            return clients, [Server(x, dialect, self._owner, version, self._model, max_requests) for x in connections]

        self._clients, servers = self._control.attempt(connect)
        self._fleet = Fleet(servers, UpdateTimes(update_seconds, drain_seconds), "rollout-http")
        self._version, self._updating = version, threading.RLock()
        self._closed = self._asleep = False
        self._tasks: set[asyncio.Task[Any]] = set()
        path = None if folder is None else Path(folder).resolve()
        self._updates = WeightUpdates(self._control, self._fleet, dialect, path, model, cast)
        try:
            if carrier is not None:
                members = Members(self._fleet, self._owner)
                self._updates.send_by(carrier, members, cast, min(update_seconds, _GROUP_SECONDS))
            self._control.attempt(lambda: self._run(gather_or_cancel((self._fleet.open(), self._clients.open()))))
        except BaseException:
            self.close()
            raise

    @property
    def owns_servers(self) -> bool:
        """True on the rank that has the servers."""
        return self._control.rank == 0

    @property
    def client(self) -> HTTPRollout | None:
        """This engine on the rank that owns the servers, ``None`` on others."""
        return self if self.owns_servers else None

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of events since the start.

        ``failed``: attempts without a reply. ``discarded``: replies of which an update cancelled the request, or of other weights than the last
        update's. ``away``: times that a server could not be reached. ``restarted``: servers that were started anew.
        """
        return {**self._fleet.counts, "restarted": sum(server.restarts for server in self._fleet.servers)}

    @property
    def version(self) -> int:
        """Oldest version among the servers. If no server's version is known, the last known one."""
        versions = [server.version for server in self._fleet.servers if server.version is not None]
        return min(versions, default=self._version)

    async def generate(self, prompt_ids: Prompt, sampling: Sampling) -> Completion:
        """Generate an answer to a prompt. Cancelling the task aborts the request on the server.

        Raises:
            ValueError: the prompt is empty, has what the model or a server does not take, or exceeds the context together with
                ``max_new_tokens``; the dialect does not support the sampling parameters; the request has stop strings and ``model`` no
                tokenizer; or the server rejects the request.
            RuntimeError: the engine is closed or asleep, or another rank has the servers. No attempt succeeded within ``deadline``, a reply
                does not have the documented form or has the token of an image, or the weights of a server give log-probs that are not finite.
        """
        self._check_awake()
        if not self.owns_servers:
            raise RuntimeError("the first rank owns the servers, and this is another: only the first generates")
        tokens, media = prompt_ids.tokens if isinstance(prompt_ids, ImagePrompt) else prompt_ids, self._model.media
        prompt = checked_prompt(tokens, self._model.vocab_size)
        images = None if tokens is prompt_ids and media.isdisjoint(prompt) else self._model.images(prompt_ids)
        self._dialect.check(sampling)
        stop = StopStrings(self._tokenizer_for(sampling), sampling.stop) if sampling.stop else None
        answer = await asyncio.wrap_future(self._submit(self._answer(Answer(prompt, sampling, stop, images))))
        return without_media(answer, media)

    def sync(self, engine: TrainEngine, version: int) -> None:
        """Send an engine's weights, or with an adapter of the dialect its selected adapter alone, to all servers. Collective over ``control``.

        Args:
            engine: its ranks are those of ``control``.
            version: version of these weights.

        Raises:
            ValueError: the weights cannot be written, or a server answers with an adapter that they would not replace. The old weights stay in
                use.
            RuntimeError: see :meth:`load`.
        """
        with self._updating:
            self._control.attempt(self._check_awake)
            self._updates.sync(engine, version)
            self._version = version

    def update(self, tensors: Iterator[NamedTensor], version: int) -> None:
        """Write new weights to ``folder``, and load them on all servers. The iterator is always exhausted, because it may be collective.

        Args:
            tensors: full tensors under Hugging Face names.
            version: version of these weights.

        Raises:
            ValueError, RuntimeError: see :meth:`sync`.
        """
        try:
            with self._updating:
                self._control.attempt(self._check_awake)
                self._updates.update(tensors, version)
                self._version = version
        finally:
            for _ in tensors:
                pass

    def load(self, folder: str | Path, version: int) -> None:
        """Load weights from a directory on all servers. Collective over ``control``.

        Args:
            folder: model directory as written by transformers, at a path that the servers can read; that of an adapter if the dialect has
                one.
            version: version of these weights.

        Raises:
            ValueError: the directory lacks a tensor of ``model``, or has it in another shape.
            RuntimeError: a server did not load them; lists the version of each server. A server that has its old version, or has loaded it
                again, stays in use. One that may have some of the new weights is excluded until the next update. Servers that cannot be
                reached are no error as long as one server has the weights. Or the engine is asleep.
        """
        with self._updating:
            self._control.attempt(self._check_awake)
            self._updates.load(folder, version)
            self._version = version

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
            if not self._asleep and any(faults := self._run(self._sleep())):
                raise RuntimeError(f"not every server can sleep: {'; '.join(filter(None, faults))}")

    def wake(self) -> None:
        """Wake all servers. May be called twice.

        Raises:
            RuntimeError: a server did not wake up. It is excluded until the next update.
        """
        with self._updating:
            if self._asleep and any(faults := self._run(self._wake())):
                raise RuntimeError(f"not every server has woken up: {'; '.join(filter(None, faults))}")

    def close(self) -> None:
        """End running requests with their tokens so far (``"aborted"``), and release thread and connections. May be called twice.

        Servers that are asleep stay asleep.
        """
        with self._updating:
            if self._closed:
                return
            self._updates.close()
            self._run(self._close())
            self._owner.retire()
            self._fleet.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokenizer_for(self, sampling: Sampling) -> PreTrainedTokenizerBase:
        """Return the tokenizer that finds stop strings, which an interruption may cut."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"Sampling.stop = {sampling.stop}: text needs a tokenizer: give HTTPRollout(model=...) a model with one, or set stop_token_ids"
            )
        return tokenizer

    # ---- run by the engine's event loop

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        """Start a coroutine on the event loop of the servers, from any thread."""
        if self._closed:
            work.close()
            raise RuntimeError("the rollout was closed: make another one")
        return self._fleet.submit(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the servers and wait for its result."""
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

    async def _next_reply(self, answer: Answer) -> tuple[ReplyPart, list[int]]:
        """Return the next tokens of an answer and their versions. Retries until there is a token, or the deadline passes."""
        answer.deadline = None
        fault = "no server could be asked"
        while True:
            server = await self._fleet.pick(answer, self._deadline)
            late = f"no answer within {self._deadline:g} s; the last attempt: {fault}"
            if server is None:
                raise RuntimeError(late)
            try:
                if (left := (answer.deadline or 0.0) - time.monotonic()) <= 0:
                    raise RuntimeError(late)
                answer.check_length(server.routes.served.max_context if server.routes is not None else None)
                reply = await server.generate(uuid.uuid4().hex, answer, min(left, self._timeout))
            except Unavailable as error:
                fault = str(error)
                self._fleet.counts["failed"] += 1
                self._fleet.report(server)
                continue
            finally:
                self._fleet.admit()
            if reply is None:
                self._fleet.counts["discarded"] += 1
                if not isinstance(server.state, Serving | Updating):
                    self._fleet.report(server)
                continue
            if reply[0].tokens or reply[0].finish == "length":
                return reply
            fault = f"{server.url} breaks off before the first token"
            await asyncio.sleep(0.05)

    def _check_awake(self) -> None:
        if self._asleep and self.owns_servers:  # which refuses for all ranks
            raise RuntimeError("the rollout is asleep: call wake() first")

    async def _sleep(self) -> list[str]:
        """Put all servers to sleep, or none. Returns the error of each, or an empty string."""
        await asyncio.gather(*(task for task in self._tasks if task.cancelling()), return_exceptions=True)
        if self._tasks:
            raise RuntimeError(f"{len(self._tasks)} answers are running: wait for them before sleep()")
        self._asleep = True
        faults = await self._fleet.sleep()
        self._asleep = not any(faults)
        return faults

    async def _wake(self) -> list[str]:
        """Wake all servers. Returns the error of each, or an empty string."""
        faults = await self._fleet.wake()
        self._asleep = False
        return faults

    async def _close(self) -> None:
        """Cancel all answers, and close the connections."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._fleet.close()
        await self._clients.close()
