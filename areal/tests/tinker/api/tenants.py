"""A server with three users, each with a session, a run, checkpoints, a sampling session and a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from areal.tests.tinker.api.bodies import JSON_BODIES
from areal.tests.unit.tinker.service.fakes import FakeSampling, FakeTraining, settings
from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.api.key_file import User
from areal.tinker.service.service import Service

API = "/api/v1"


def user(name: str, key: str, role: str = "user") -> User:
    """Return a user of a key file."""
    return User.model_validate({"name": name, "key": key, "role": role})


USERS = tuple(
    user(name, f"tml-key-of-{name}", "admin" if name == "root" else "user") for name in ("ann", "bob", "root")
)


class Client:
    """A client of the application with the key of a user."""

    def __init__(self, app: FastAPI, user: str) -> None:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        headers = {"X-API-Key": f"tml-key-of-{user}"}
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://server", headers=headers)

    async def send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        return await self.http.request(method, path, json=body)

    async def post(self, route: str, **body: Any) -> Any:
        answer = await self.send("POST", f"{API}/{route}", body)
        assert answer.status_code == 200, (route, answer.text)
        return answer.json()

    async def get(self, route: str) -> Any:
        answer = await self.send("GET", f"{API}/{route}")
        assert answer.status_code == 200, (route, answer.text)
        return answer.json()

    async def done(self, route: str, **body: Any) -> Any:
        """Submit a request and return its result."""
        result = await self._ended(route, body)
        assert "error" not in result, (route, result)
        return result

    async def failed(self, route: str, **body: Any) -> dict[str, Any]:
        """Submit a request that fails. Returns its error."""
        result = await self._ended(route, body)
        assert "error" in result, (route, result)
        return result

    async def _ended(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a request, and ask for its end as often as the server says so."""
        request_id = (await self.post(route, **body))["request_id"]
        while (result := await self.post("retrieve_future", request_id=request_id)).get("type") == "try_again":
            pass
        return {**result, "request_id": request_id}

    async def model(self, session_id: str, number: int = 0) -> str:
        """Create a model in a session."""
        place = {"session_id": session_id, "model_seq_id": number}
        return (await self.done("create_model", **place, base_model="base", lora_config={"rank": 4}))["model_id"]


async def own(client: Client) -> dict[str, str]:
    """Create one object of each kind, and return their identifiers by the names of fields and parameters."""
    session = (await client.post("create_session"))["session_id"]
    model = await client.model(session)
    saved = await client.done("save_weights", model_id=model, seq_id=1, path="mine")
    sampled = await client.done("save_weights_for_sampler", model_id=model, seq_id=2, path="mine")
    place = {"session_id": session, "sampling_session_seq_id": 0}
    sampler = (await client.post("create_sampling_session", **place, model_path=sampled["path"]))["sampling_session_id"]
    return {
        **{"session_id": session, "model_id": model, "run_id": model},
        **{"sampling_session_id": sampler, "sampler_id": sampler, "request_id": saved["request_id"]},
        **{"path": saved["path"], "tinker_path": saved["path"], "model_path": sampled["path"]},
    }


@asynccontextmanager
async def tenants(root: Path, users: tuple[User, ...] = USERS, **changes: Any) -> AsyncIterator[list[Client]]:
    """Yield a client for each user of a started server."""
    quotas = {user.name: user.quotas for user in users}
    service = Service(FakeTraining(), FakeSampling(), settings(root, quotas=quotas, **changes))
    await service.start()
    app = create_app(service, ApiSettings(users=users, hold_s=10.0))
    clients = [Client(app, user.name) for user in users]
    try:
        yield clients
    finally:
        await asyncio.gather(*(client.http.aclose() for client in clients))
        await service.stop()


def body_of(route: str) -> dict[str, Any]:
    """Return a body of a route without identifiers, which the caller adds."""
    return dict(JSON_BODIES.get(route, {}))
