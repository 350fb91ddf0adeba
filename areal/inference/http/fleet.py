"""All servers of one owner: which of them answers a request, updates of all, and servers that die and return."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from areal.inference.http.answer import Answer
from areal.inference.http.folder_update import restore_server, update_server
from areal.inference.http.server import Server
from areal.inference.http.server_connection import Unavailable
from areal.inference.http.server_state import Away, Lost, ServerWeights, Serving, Taken, UpdateTimes, Updating
from areal.inference.http.waiting_line import WaitingLine

T = TypeVar("T")

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 10.0
"""Time limit of the first contact. A server that does not answer then is examined when it does."""
_GRACE_SECONDS = 10.0
"""Seconds that an update waits for servers that cannot be reached, once another one has it."""
_HANDOVER_SECONDS = 0.005
"""Seconds between the end of an update and the requests that have waited for it."""
_SLACK = 4
"""Requests that a server may have more than another before known prefixes go elsewhere, in addition to a quarter of its requests."""


class Fleet:
    """Servers that an owner uses together, and the thread whose event loop runs all coroutines here, until :meth:`stop`.

    A server that cannot be reached gets no requests until it answers again. One that was started anew gets the current weights first.

    Args:
        servers: the servers.
        times: time limits of an update.
        name: name of the thread.

    Attributes:
        servers: the servers.
        counts: numbers of events, by name.
        desired: weights of the last update that reached a server; ``None`` before the first.
    """

    def __init__(self, servers: Sequence[Server], times: UpdateTimes, name: str) -> None:
        self.servers = list(servers)
        self.counts = Counter(dict.fromkeys(("failed", "discarded", "away"), 0))
        self.desired: ServerWeights | None = None
        self._times = times
        self._affinity = Affinity()
        self._line = WaitingLine()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the event loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the thread, after :meth:`close`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def open(self) -> None:
        """Make the first contact with the servers that can be reached.

        Raises:
            ValueError, RuntimeError: a server cannot be used; names it.
        """
        contacts = [server.examine(_OPEN_SECONDS) for server in self.servers]
        results = await asyncio.gather(*contacts, return_exceptions=True)
        for server, result in zip(self.servers, results, strict=True):
            if isinstance(result, Unavailable):
                self.report(server)
            elif isinstance(result, BaseException):
                raise result

    # ---- requests

    async def pick(self, answer: Answer, patience: float) -> Server | None:
        """Return the server for the next request of an answer; ``None`` if the answer's deadline passes before one can be asked.

        Args:
            answer: it gets a deadline if it is without one. The deadline is suspended while servers are in an update, or
                have as many requests as they may.
            patience: seconds until a new deadline.

        Raises:
            RuntimeError: no server has known weights, and none can get them before an update.
        """
        ticket = None
        while not (ready := self._ready()):
            if all(isinstance(server.state, Lost | Taken) for server in self.servers):
                raise RuntimeError(f"no server has known weights: {'; '.join(server.why for server in self.servers)}")
            # Servers that are in an update or have enough requests return by themselves; others may never.
            returns = any(isinstance(server.state, Updating | Serving) for server in self.servers)
            answer.deadline = None if returns else answer.deadline or time.monotonic() + patience
            left = None if answer.deadline is None else max(0.0, answer.deadline - time.monotonic())
            ticket = self._line.ticket() if ticket is None else ticket
            try:
                await self._line.wait(ticket, left)
            except TimeoutError:
                return None
        answer.deadline = answer.deadline or time.monotonic() + patience
        fewest = min(ready, key=operator.attrgetter("requests.load"))
        # A server that has the prompt's keys and values may have a little more to do than others.
        text = answer.prompt + answer.tokens
        known = self._affinity.find(text) if len(self.servers) > 1 else None
        chosen = next((server for server in ready if server.url == known), fewest)
        if len(chosen.requests) > _SLACK + 1.25 * len(fewest.requests):
            chosen = fewest
        if len(self.servers) > 1:
            self._affinity.note(text, chosen.url)
        return chosen

    def admit(self) -> None:
        """Let as many answers go on as there are requests that servers can take."""
        if self._line.waiting:
            self._line.wake(sum([server.requests.room for server in self._ready()]))

    def _notify(self) -> None:
        """Let answers go on after a change of a server's state. Without a server in use, all do: they get a deadline, or raise."""
        if any(isinstance(server.state, Serving) for server in self.servers):
            self.admit()
        else:
            self._line.wake()

    def _ready(self) -> list[Server]:
        """Return the servers that can take another request."""
        return [each for each in self.servers if each.requests.room]

    def report(self, server: Server) -> None:
        """Note that a server could not be reached, was started anew, or was taken. It gets no requests until it has the current weights."""
        if isinstance(server.state, Serving):
            server.enter(Away(server.version, f"{server.url} cannot be reached"))
        self._notify()
        if isinstance(server.state, Lost | Taken | Updating) or self._returns(server):
            return
        self.counts["away"] += 1
        self._start(self._bring_back(server), server.url)

    def _returns(self, server: Server) -> bool:
        """Return whether a server is being brought back."""
        return any(task.get_name() == server.url and not task.done() for task in self._tasks)

    async def _bring_back(self, server: Server) -> None:
        """Ask a server until it answers, and give it the current weights if it does not have them."""
        while not isinstance(server.state, Serving | Lost | Taken):
            await asyncio.sleep(max(0.0, server.connection.backoff_until - time.monotonic()))
            try:
                await restore_server(server, lambda: self.desired, _OPEN_SECONDS, self._times)
            except Unavailable:
                continue
            except (RuntimeError, ValueError) as error:
                server.enter(Lost(f"{server.url} is left out until the next update: {error}"))
                logger.warning(server.why)
            self._notify()

    # ---- updates

    async def load(self, folder: str, version: int) -> list[str]:
        """Load a version on all servers at once. Returns the errors.

        Servers that cannot be reached do not hold up the others for long: they get the version when they return.
        """
        weights = ServerWeights(version, folder)
        tasks = {asyncio.create_task(self._load_on(server, weights)): server for server in self.servers}
        pending = set(tasks)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=0.5)
            if self.desired is weights:
                self._give_up({task: tasks[task] for task in pending})
        for server in tasks.values():
            if isinstance(server.state, Away):
                self.report(server)
        return [task.result() for task in tasks]

    def _give_up(self, pending: dict[asyncio.Task[str], Server]) -> None:
        """Cancel the updates of servers that have not been reachable for some time."""
        for task, server in pending.items():
            since = server.connection.away_since
            if since is not None and time.monotonic() - since > _GRACE_SECONDS:
                task.cancel()

    async def _load_on(self, server: Server, weights: ServerWeights) -> str:
        """Load a version on one server, and wake the requests that wait for one."""
        try:
            fault = await update_server(server, weights, self._times)
            if server.version == weights.version:
                self.desired = weights
            return fault
        except asyncio.CancelledError:
            server.enter(Away(None, f"{server.url} cannot be reached"))
            return server.why
        finally:
            # The trainer, which waits for the update, goes on before the requests do.
            asyncio.get_running_loop().call_later(_HANDOVER_SECONDS, self._notify)

    # ---- updates over a process group

    async def reachable(self) -> list[Server]:
        """Return the servers that can take part in an update.

        Raises:
            RuntimeError: there is none.
        """
        there = await asyncio.gather(*(server.answers() for server in self.servers))
        some = [server for server, is_there in zip(self.servers, there, strict=True) if is_there]
        for server, is_there in zip(self.servers, there, strict=True):
            if not is_there:
                self.report(server)
        if not some:
            reasons = "; ".join(server.why or f"{server.url} cannot be reached" for server in self.servers)
            raise RuntimeError(f"no server can get weights: {reasons}")
        return some

    async def hold(self, servers: Sequence[Server]) -> None:
        """Pause servers for an update, until :meth:`release`. Updates and loads after a restart wait.

        Raises:
            RuntimeError: a server cannot be paused.
        """
        for server in servers:
            await server.turn.acquire()
        faults = await asyncio.gather(*(server.pause(self._times) for server in servers), return_exceptions=True)
        found = [str(fault) for fault in faults if isinstance(fault, BaseException)]
        if found:
            raise RuntimeError("; ".join(found))

    async def release(self, servers: Sequence[Server], version: int | None, faults: Mapping[str, str]) -> None:
        """End a pause of :meth:`hold`.

        Args:
            servers: those of :meth:`hold`.
            version: version that servers without a fault have now; ``None`` if they have what they had.
            faults: reason by URL of servers whose weights are lost.

        Raises:
            RuntimeError: a server without a fault does not continue.
        """
        ends = await asyncio.gather(*(self._release(each, version, faults.get(each.url, "")) for each in servers))
        if version is not None:
            self.desired = ServerWeights(version, folder=None)
            for server in set(self.servers) - set(servers):
                server.enter(Lost(f"{server.url} was away when version {version} was sent: it gets the next one"))
        self._notify()
        found = [end for server, end in zip(servers, ends, strict=True) if end and server.url not in faults]
        if found:
            raise RuntimeError("; ".join(found))

    async def _release(self, server: Server, version: int | None, fault: str) -> str:
        try:
            if fault:
                server.enter(Updating(Lost(fault)))
            elif version is not None:
                await server.confirm(version)
        except (RuntimeError, ValueError) as error:
            fault = str(error)
            server.enter(Updating(Lost(fault)))
        try:
            return await server.resume(fault, self._times)
        finally:
            server.turn.release()

    # ---- sleep

    async def sleep(self) -> list[str]:
        """Put all servers to sleep, or none. Returns the error of each, or an empty string."""
        faults = await asyncio.gather(*(sleep_server(each, self._times.step) for each in self.servers))
        if any(faults):
            await self.wake([each for each, fault in zip(self.servers, faults, strict=True) if not fault])
        return faults

    async def wake(self, servers: Sequence[Server] | None = None) -> list[str]:
        """Wake servers, by default all. Returns the error of each, or an empty string."""
        return await asyncio.gather(
            *(wake_server(each, self._times.step) for each in (self.servers if servers is None else servers))
        )

    async def close(self) -> None:
        """Leave the servers to others, and close the connections."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.gather(*(server.close() for server in self.servers))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def sleep_server(server: Server, seconds: float) -> str:
    """Pause a server and free its device memory. Returns the error, after which the server runs on, or an empty string."""
    try:
        routes = await server.known_routes(time.monotonic() + seconds)
        if routes.sleeps is None:
            raise ValueError(f"{server.url}: servers of this kind cannot sleep")
        await server.connection.send(routes.pauses.interrupt, seconds)
        await server.connection.send(routes.sleeps.sleep, seconds)
    except (RuntimeError, ValueError) as error:
        if server.routes is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                await server.connection.send(server.routes.pauses.resume, seconds)
        return str(error)
    return ""


async def wake_server(server: Server, seconds: float) -> str:
    """Take the device memory back, and resume. Returns the error, after which the weights are unknown, or an empty string."""
    try:
        routes = await server.known_routes(time.monotonic() + seconds)
        if routes.sleeps is None:
            return ""
        for call in (routes.sleeps.wake, routes.pauses.resume):
            await server.connection.insist(call, time.monotonic() + seconds)
    except (RuntimeError, ValueError) as error:
        server.enter(Lost(f"{server.url} did not wake up"))
        return str(error)
    if not routes.sleeps.keeps_weights:
        server.enter(Lost(f"{server.url} has slept without a backup of its weights: send an update"))
    return ""


_BLOCK = 64
"""Tokens of a block. Prefixes are compared block by block."""
_REMEMBERED = 2**16
"""Maximum number of prefixes."""


class Affinity:
    """Remembers the server that last had a prefix: answers of one group, and the turns of one episode, share theirs."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, str] = OrderedDict()

    def find(self, prompt: Sequence[int]) -> str | None:
        """Return the URL of the server with the longest prefix of a prompt."""
        found = None
        # From the shortest prefix: the last that is known is the longest.
        for key in _prefixes(prompt):
            found = self._places.get(key, found)
        return found

    def note(self, prompt: Sequence[int], url: str) -> None:
        """Record that a server computes a prompt."""
        for key in _prefixes(prompt):
            self._places[key] = url
            self._places.move_to_end(key)
        while len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)


def _prefixes(prompt: Sequence[int]) -> Iterator[int]:
    """Yield a key of each prefix that ends with a block, from the shortest; the last is the whole prompt."""
    key = 0
    for start in range(0, len(prompt), _BLOCK):
        key = hash((key, *prompt[start : start + _BLOCK]))
        yield key
