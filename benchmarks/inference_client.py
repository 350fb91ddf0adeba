"""CPU time of the client of inference servers per request, on stand-in servers with canned replies: ``python -m benchmarks.inference_client``.

The same requests are sent by a client of asyncio streams and ``json``, in turn. A process of its own runs the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from areal.inference import VLLM, HTTPRollout, Sampling

PROMPT = list(range(1, 33))
ROUTE = "/inference/v1/generate"
_PATHS = (ROUTE, "/weight_info", "/update_weight_version", "/openapi.json", "/health", "/pause", "/resume")


def generated(tokens: int, label: str) -> bytes:
    """Return a reply of vLLM with a number of tokens, of weights with a label."""
    ids = [(7 * i) % 1000 for i in range(tokens)]
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{i}", "token_id": i, "logprob": -1.2345678, "bytes": None, "top_logprobs": []} for i in ids
    ]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "logprobs": {"content": content},
    }
    choice["weight_versions"] = [{"version": label, "start": 0, "end": tokens}]
    return json.dumps({"request_id": "x", "choices": [choice], "prompt_logprobs": None}).encode()


class Server:
    """Stand-in for one server.

    Args:
        tokens: length of each answer.
        seconds: time of an answer.
    """

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = tokens, seconds
        self.replies = {
            b"/openapi.json": json.dumps({"paths": {path: {} for path in _PATHS}}).encode(),
            b"/tokenize": b'{"tokens": [1, 2, 3]}',
            b"/resume": b'{"status": "resumed"}',
        }
        self.label("default")

    def label(self, label: str) -> None:
        """Set the label of the weights."""
        self.replies[b"/weight_info"] = json.dumps({"weight_version": label}).encode()
        self.replies[ROUTE.encode()] = generated(self.tokens, label)

    def reply(self, path: bytes, body: bytes) -> tuple[bytes, float]:
        """Return the body of a reply, and the seconds until it is sent."""
        if path == b"/update_weight_version":
            self.label(json.loads(body)["new_version"])
        return self.replies.get(path, b"{}"), self.seconds if path == ROUTE.encode() else 0.0


class Connection(asyncio.Protocol):
    """One connection to a stand-in server."""

    def __init__(self, server: Server) -> None:
        self._server, self._data = server, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            path = self._data.split(b" ", 2)[1].split(b"?")[0]
            body, wait = self._server.reply(path, self._data[end + 4 : end + 4 + length])
            self._data = self._data[end + 4 + length :]
            reply = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            asyncio.get_running_loop().call_later(wait, self._answer, reply)

    def _answer(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)


async def serve(servers: int, tokens: int, seconds: float) -> None:
    """Run stand-in servers, and print their ports."""
    loop, listening = asyncio.get_running_loop(), []
    for _ in range(servers):
        each = Server(tokens, seconds)
        made = functools.partial(Connection, each)
        listening.append(await loop.create_server(made, "127.0.0.1", 0, backlog=4096))
    print(json.dumps([each.sockets[0].getsockname()[1] for each in listening]), flush=True)
    await asyncio.Event().wait()


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

    def __init__(self, ports: Sequence[int], tokens: int) -> None:
        self._ports, self._tokens = ports, tokens
        self._free: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {port: [] for port in ports}

    async def ask(self, number: int) -> int:
        port = self._ports[number % len(self._ports)]
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


def through_streams(ports: Sequence[int], tokens: int, requests: int, concurrent: int) -> float:
    """Return CPU seconds per request."""
    begin = time.process_time()
    asyncio.run(all_of(Streams(ports, tokens).ask, requests, concurrent))
    return (time.process_time() - begin) / requests


def through_rollout(ports: Sequence[int], tokens: int, requests: int, concurrent: int) -> float:
    """Return CPU seconds per request. All threads of the client count."""
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with HTTPRollout(urls, VLLM(), folder=folder) as rollout:

            async def ask(number: int) -> int:
                sampling = Sampling(max_new_tokens=tokens, seed=number, stop_token_ids=())
                return len((await rollout.generate(PROMPT, sampling)).tokens)

            asyncio.run(all_of(ask, len(ports), len(ports)))  # meets the servers
            begin = time.process_time()
            asyncio.run(all_of(ask, requests, concurrent))
            return (time.process_time() - begin) / requests


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.2, help="time of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="run the servers only")
    given = parser.parse_args()
    # Each connection is a file.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.serve:
        asyncio.run(serve(given.servers, given.tokens, given.seconds))
        return
    options = [f"--{name}={getattr(given, name)}" for name in ("servers", "tokens", "seconds")]
    command = [sys.executable, "-m", "benchmarks.inference_client", "--serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ports = json.loads(process.stdout.readline()) if process.stdout is not None else []
            ways = {"asyncio streams": through_streams, "HTTPRollout": through_rollout}
            rounds = [
                {name: way(ports, given.tokens, given.requests, given.concurrent) for name, way in ways.items()}
                for _ in range(given.rounds)
            ]
        finally:
            process.kill()
    print(
        f"{given.servers} servers, {given.concurrent} concurrent requests of {given.tokens} tokens, {given.requests} in all, "
        f"{given.rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for name in ways:
        print(f"{name:20}{1e3 * statistics.median(each[name] for each in rounds):8.3f} ms of CPU per request")
    print(f"ratio {statistics.median(each['HTTPRollout'] / each['asyncio streams'] for each in rounds):.2f}")


if __name__ == "__main__":
    main()
