"""CPU time and memory of the client of inference servers per request, on stand-in servers with canned replies: ``make bench-client``.

The same requests are sent by a client of asyncio streams and ``json``, in turn, and with ``--client-processes`` by a client whose requests
such processes send. Processes of their own run the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal.inference import VLLM, HTTPRollout, Sampling
from areal.tests.harness.servers.canned_server import ROUTE

PROMPT = list(range(1, 33))


Ask = Callable[[int], Awaitable[int]]
"""Sends the request of a number. Returns the number of tokens of the reply."""


async def all_of(ask: Ask, requests: int, concurrent: int) -> None:
    """Send requests, so many at once."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(client() for _ in range(concurrent)))


class Streams:
    """Client of asyncio streams: sends the same requests on connections that it keeps, and reads the replies as JSON."""

    def __init__(self, ports: Sequence[int], given: argparse.Namespace) -> None:
        self._ports, self._tokens = ports, given.tokens
        self._free: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {port: [] for port in ports}
        self._turns = {port: asyncio.Semaphore(given.max_requests or given.concurrent) for port in ports}

    async def ask(self, number: int) -> int:
        """Send one request, when its server can take it."""
        port = self._ports[number % len(self._ports)]
        async with self._turns[port]:
            return await self._send(number, port)

    async def _send(self, number: int, port: int) -> int:
        drawn = {
            "max_tokens": self._tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": number,
            "logprobs": 0,
        }
        sampling = drawn | {"stop_token_ids": [], "ignore_eos": True, "detokenize": False}
        body = json.dumps({"request_id": f"{number:032x}", "token_ids": PROMPT, "sampling_params": sampling}).encode()
        free = self._free[port]
        reader, writer = free.pop() if free else await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (ROUTE.encode(), len(body))
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        choice = json.loads(await reader.readexactly(length))["choices"][0]
        free.append((reader, writer))
        return len([each["logprob"] for each in choice["logprobs"]["content"]])


@dataclass
class Cost:
    """CPU seconds per request, bytes of memory per request at once, and CPU seconds of client processes per request."""

    seconds: float
    memory: float
    processes: float = 0.0


@contextlib.contextmanager
def measured(given: argparse.Namespace) -> Iterator[Cost]:
    """Measure the requests that are sent in this context, by all threads."""
    cost = Cost(0.0, 0.0)
    before, begin = resident(), time.process_time()
    highest = threading.Thread(target=watch, args=(cost, ended := threading.Event()))
    highest.start()
    yield cost
    cost.seconds = (time.process_time() - begin) / given.requests
    ended.set()
    highest.join()
    cost.memory = (cost.memory - before) / given.concurrent


def watch(cost: Cost, ended: threading.Event) -> None:
    """Note the largest memory of this process in ``cost.memory``."""
    while not ended.wait(0.2):
        cost.memory = max(cost.memory, resident())


def resident() -> int:
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def through_streams(ports: Sequence[int], given: argparse.Namespace) -> Cost:
    """Return the costs of the bare client."""
    with measured(given) as cost:
        asyncio.run(all_of(Streams(ports, given).ask, given.requests, given.concurrent))
    return cost


def client_seconds() -> float:
    """Return the CPU seconds of all client processes of this process."""
    seconds = 0.0
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            folder = Path("/proc", child)
            if "client_process" in (folder / "cmdline").read_text():
                user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def through_rollout(ports: Sequence[int], given: argparse.Namespace, processes: int = 0) -> Cost:
    """Return the costs of the client of this package, with a number of client processes."""
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with HTTPRollout(
            urls, VLLM(), folder=folder, max_requests=given.max_requests, client_processes=processes
        ) as rollout:

            async def ask(number: int) -> int:
                sampling = Sampling(max_new_tokens=given.tokens, seed=number, stop_token_ids=())
                return len((await rollout.generate(PROMPT, sampling)).tokens)

            asyncio.run(all_of(ask, len(ports), len(ports)))  # meets the servers
            before = client_seconds()
            with measured(given) as cost:
                asyncio.run(all_of(ask, given.requests, given.concurrent))
            cost.processes = (client_seconds() - before) / given.requests
            return cost


@contextlib.contextmanager
def servers(given: argparse.Namespace) -> Iterator[list[int]]:
    """Run stand-in servers in some processes. Yields their ports."""
    options = [
        f"--servers={given.servers // given.processes}",
        f"--tokens={given.tokens}",
        f"--seconds={given.seconds}",
    ]
    command = [sys.executable, "-m", "areal.tests.harness.servers.canned_server", *options]
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for _ in range(given.processes):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            ports += json.loads(process.stdout.readline()) if process.stdout is not None else []
        yield ports


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="that run the servers")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--max-requests", type=int, help="on one server at once")
    parser.add_argument("--seconds", type=float, default=0.2, help="time of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client-processes", type=int, default=2, help="of the last row; 0 leaves it out")
    given = parser.parse_args()
    # Each connection is a file.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ways = {"asyncio streams": through_streams, "HTTPRollout": through_rollout}
    if given.client_processes:
        owner = f"with {given.client_processes} processes"
        ways[owner] = functools.partial(through_rollout, processes=given.client_processes)
    # A full garbage collection passes over all that was imported, which is the same for each client.
    gc.freeze()
    with servers(given) as ports:
        rounds = [{name: way(ports, given) for name, way in ways.items()} for _ in range(given.rounds)]
    print(
        f"{given.servers} servers, {given.concurrent} concurrent requests of {given.tokens} tokens, {given.requests} in all, "
        f"{given.rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for name in ways:
        seconds = statistics.median(each[name].seconds for each in rounds)
        others = statistics.median(each[name].processes for each in rounds)
        # Later rounds use memory of the first one again.
        print(
            f"{name:20}{1e3 * seconds:8.3f} ms of CPU, {rounds[0][name].memory / 1024:6.1f} KiB per request"
            + (f", {1e3 * others:.3f} ms in the other processes" if others else "")
        )
    for name, base in itertools.pairwise(reversed(ways)):
        print(
            f"ratio {statistics.median(each[name].seconds / each[base].seconds for each in rounds):.2f}: {name} to {base}"
        )


if __name__ == "__main__":
    main()
