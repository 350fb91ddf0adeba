"""Requests that schemathesis makes from the OpenAPI description, to the application on the real service."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings

from areal.tests.unit.tinker.service.fakes import FakeSampling, serving
from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import ApiSettings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@contextlib.contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve the application from a thread, and yield its address."""
    server: list[Any] = []

    async def run() -> None:
        async with serving(root, sampling=FakeSampling(), gap_timeout_s=0.5) as service:
            app = create_app(cast(Any, service), ApiSettings(hold_s=0.2))
            server.append(uvicorn.Server(uvicorn.Config(app, port=0, log_level="error")))
            await server[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    while not (server and server[0].started):
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server[0].servers[0].sockets[0].getsockname()[1]}"
    server[0].should_exit = True
    thread.join(20)


def test_no_request_from_the_description_is_answered_5xx(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) > 40
        for operation in operations:

            @settings(
                max_examples=12,
                deadline=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def check(case: Any) -> None:
                answer = case.call()
                assert answer.status_code < 500, (case.formatted_path, answer.text)

            check()
