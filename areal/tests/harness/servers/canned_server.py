"""Stand-ins for vLLM servers with canned replies, which cost little: ``python -m areal.tests.harness.servers.canned_server``."""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


class CannedServer:
    """Stand-in for one server.

    Args:
        tokens: length of each answer.
        seconds: time of an answer.
        slots: number of answers that it generates at once, while others wait; ``None`` for any number.

    Attributes:
        running, most: requests for answers that it has, and their largest number so far.
        answered: number of answers.
        connections: number of open connections.
    """

    def __init__(self, tokens: int, seconds: float, slots: int | None = None) -> None:
        self.tokens, self._seconds = tokens, seconds
        self._free_at = [0.0] * (slots or 0)
        self.running = self.most = self.answered = self.connections = 0
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

    def reply(self, path: bytes, body: bytes) -> bytes:
        """Return the body of a reply."""
        if path == b"/update_weight_version":
            self.label(json.loads(body)["new_version"])
        return self.replies.get(path, b"{}")

    def begin(self) -> float:
        """Begin an answer. Returns the seconds until it is complete."""
        self.running += 1
        self.most = max(self.most, self.running)
        if not self._free_at:
            return self._seconds
        now = asyncio.get_running_loop().time()
        end = max(now, self._free_at[0]) + self._seconds
        heapq.heapreplace(self._free_at, end)
        return end - now

    def end(self) -> None:
        """Note that an answer is complete."""
        self.running -= 1
        self.answered += 1


class CannedConnection(asyncio.Protocol):
    """One connection to a stand-in server."""

    def __init__(self, server: CannedServer) -> None:
        self._server, self._data = server, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._server.connections += 1

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections -= 1

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            path = self._data.split(b" ", 2)[1].split(b"?")[0]
            body = self._server.reply(path, self._data[end + 4 : end + 4 + length])
            self._data = self._data[end + 4 + length :]
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            if path == ROUTE.encode():
                asyncio.get_running_loop().call_later(self._server.begin(), self._answer, head + body)
            else:
                self._transport.write(head + body)

    def _answer(self, reply: bytes) -> None:
        self._server.end()
        if not self._transport.is_closing():
            self._transport.write(reply)


async def listen(server: CannedServer) -> int:
    """Let a server answer on a port, and return that."""
    made = functools.partial(CannedConnection, server)
    listening = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0, backlog=4096)
    port: int = listening.sockets[0].getsockname()[1]
    return port


@contextmanager
def canned_servers(*servers: CannedServer) -> Iterator[list[str]]:
    """Run servers in a thread. Yields their URLs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="canned-servers", daemon=True)
    thread.start()
    try:
        started = [asyncio.run_coroutine_threadsafe(listen(server), loop) for server in servers]
        yield [f"http://127.0.0.1:{each.result()}" for each in started]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def serve(servers: int, tokens: int, seconds: float) -> None:
    """Run servers, and print their ports."""
    ports = [await listen(CannedServer(tokens, seconds)) for _ in range(servers)]
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("servers", int), ("tokens", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.servers, given.tokens, given.seconds))
