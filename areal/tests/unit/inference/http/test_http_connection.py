"""Connections to a server: replies in pieces, connections that end, and errors that name the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from areal.inference.http.server_connection import ServerConnection, Unavailable
from areal.inference.http.servers.http_call import HTTPCall, LabelReply, Tokenize, Tokenized

LABEL = HTTPCall.get("/weight_info", LabelReply, {"of": "a b"})
BODY = b'{"weight_version": "areal/7"}'
WITH_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n"
    + BODY[:5]
    + b"\r\n18\r\n"
    + BODY[5:]
    + b"\r\n0\r\n\r\n"
)

Scenario = Callable[[ServerConnection, "Raw"], Awaitable[None]]


class Raw:
    """A server that sends given bytes after each request. ``b""`` closes the connection, ``None`` sends nothing."""

    def __init__(self, *replies: bytes | None, ends: bool = False) -> None:
        self.replies, self._ends = list(replies), ends
        self.requests: list[bytes] = []
        self.connections = self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while request := await reader.read(2**16):
            self.requests.append(request)
            reply = self.replies.pop(0)
            for byte in reply or b"":
                writer.write(bytes([byte]))
                await writer.drain()
            if self._ends or reply == b"":
                break
        self.closed += 1
        writer.close()


def on(raw: Raw, scenario: Scenario) -> None:
    """Run a scenario on a connection to a server."""

    async def run() -> None:
        async with await asyncio.start_server(raw.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection = ServerConnection(f"http://127.0.0.1:{port}/base/", {"Authorization": "Bearer key"})
            await scenario(connection, raw)
            connection.close()

    asyncio.run(run())


@pytest.mark.parametrize("reply", [WITH_LENGTH, CHUNKED])
def test_replies_in_pieces_come_by_one_connection(reply: bytes) -> None:
    async def scenario(connection: ServerConnection, raw: Raw) -> None:
        new = []
        for _ in range(3):
            answer = await connection.send(LABEL, 5.0, lambda: new.append(1))
            assert answer.weight_version == "areal/7"
        assert raw.connections == len(new) == 1
        head = raw.requests[0].decode()
        assert head.startswith("GET /base/weight_info?of=a+b HTTP/1.1\r\nhost: 127.0.0.1:")
        assert "Authorization: Bearer key\r\n" in head

    on(Raw(reply, reply, reply), scenario)


def test_body_is_sent_with_its_length() -> None:
    async def scenario(connection: ServerConnection, raw: Raw) -> None:
        call = HTTPCall("/tokenize", Tokenize(prompt="ü"), Tokenized)
        assert (await connection.send(call, 5.0)).tokens == [5]
        head, body = raw.requests[0].split(b"\r\n\r\n")
        assert body == '{"prompt":"ü","add_special_tokens":false}'.encode()
        assert b"content-length: %d" % len(body) in head

    on(Raw(b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"tokens":[5]}'), scenario)


def test_connection_that_the_server_ends_is_not_used_again() -> None:
    async def scenario(connection: ServerConnection, raw: Raw) -> None:
        for _ in range(2):
            await connection.send(LABEL, 5.0)
        assert raw.connections == 2

    last = WITH_LENGTH.replace(b"content-length", b"connection: close\r\ncontent-length")
    on(Raw(last, last, ends=True), scenario)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "the server closed the connection"),
        (WITH_LENGTH[:-3], "the server closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "the reply is no HTTP"),
    ],
)
def test_broken_replies_name_the_server_and_count_as_unavailable(reply: bytes, words: str) -> None:
    async def scenario(connection: ServerConnection, _: Raw) -> None:
        with pytest.raises(Unavailable, match=f"http://127.0.0.1:[0-9]+/base/weight_info: .*{words}"):
            await connection.send(LABEL, 5.0)
        assert connection.away_since is not None
        assert (await connection.send(LABEL, 5.0)).weight_version == "areal/7"

    on(Raw(reply, WITH_LENGTH, ends=True), scenario)


def test_request_without_a_reply_ends_with_its_connection() -> None:
    async def scenario(connection: ServerConnection, raw: Raw) -> None:
        with pytest.raises(Unavailable, match=r"no answer within 0\.1 s"):
            await connection.send(LABEL, 0.1)
        task = asyncio.create_task(connection.send(LABEL, 5.0))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert raw.closed == raw.connections == 2
        assert (await connection.send(LABEL, 5.0)).weight_version == "areal/7"

    on(Raw(None, None, WITH_LENGTH), scenario)


def test_backoff_doubles_up_to_its_maximum_however_many_faults_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    connection = ServerConnection("http://host")

    def seconds_after_a_fault() -> float:
        connection.backoff_until = 0.0  # as if that time had passed
        connection.note(None)
        return connection.backoff_until - now

    seconds = [seconds_after_a_fault() for _ in range(2000)]  # a server that is away for hours
    for i, each in enumerate(seconds[:6]):
        assert 0.049 * 2**i < each < 0.101 * 2**i
    assert all(2.49 < each < 5.01 for each in seconds[6:])
    connection.note(200)
    assert seconds_after_a_fault() < 0.101


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://user:key@host", "http://"])
def test_address_of_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"url = .*http://HOST:PORT"):
        ServerConnection(url)


def test_key_of_two_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="'Authorization' has more than one line"):
        ServerConnection("http://host", {"Authorization": "Bearer a\nb"})
