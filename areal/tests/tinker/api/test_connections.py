"""Connections: half-sent requests are closed, complete ones are not, and their number is limited."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from areal.cli.serve import connection_class

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, and answer late."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


def connect(server: ServerState, most: int = 10) -> tuple[Any, Mock]:
    """Return a new connection, and its transport."""
    config = Config(answer, lifespan="off", log_config=None)
    connection = connection_class(most, 0.05)(config=config, server_state=server, app_state={})
    transport = Mock()
    transport.get_extra_info = lambda name, default=None: None
    transport.is_closing = lambda: transport.abort.called
    connection.connection_made(transport)
    return connection, transport


@pytest.mark.parametrize("pieces", [[], [b"GET /x HTT"], [HEAD], [HEAD, b"ab"], [HEAD + b"abcd", b"GET /y"]])
def test_a_request_that_stays_incomplete_ends_its_connection(pieces: list[bytes]) -> None:
    async def main() -> None:
        connection, transport = connect(ServerState())
        for piece in pieces:
            connection.data_received(piece)
        await asyncio.sleep(0.01)
        transport.abort.assert_not_called()
        await asyncio.sleep(0.25)
        transport.abort.assert_called_once()
        connection.connection_lost(None)

    asyncio.run(main())


def test_a_complete_request_is_answered_late_and_its_connection_stays() -> None:
    async def main() -> None:
        connection, transport = connect(ServerState())
        # The body is slow, and each piece is in time.
        for piece in (HEAD[:9], HEAD[9:], b"a", b"b", b"cd"):
            connection.data_received(piece)
            await asyncio.sleep(0.03)
        await asyncio.sleep(0.6)
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        assert written.startswith(b"HTTP/1.1 200")
        transport.abort.assert_not_called()
        connection.connection_lost(None)

    asyncio.run(main())


def test_the_number_of_connections_is_limited() -> None:
    async def main() -> None:
        server = ServerState()
        first, second, third = (connect(server, most=2) for _ in range(3))
        assert [transport.abort.called for _, transport in (first, second, third)] == [False, False, True]
        third[0].connection_lost(None)
        first[0].connection_lost(None)
        assert not connect(server, most=2)[1].abort.called

    asyncio.run(main())
