"""Damaged requests to the application on the real service: each answer is below 500, and each future is resolved."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal.tests.tinker.api.bodies import JSON_BODIES, PROTOBUF, cross_entropy_request
from areal.tests.tinker.api.fuzz import places, replaced
from areal.tests.tinker.api.stand_in import client_of
from areal.tests.unit.tinker.service.fakes import FakeSampling, serving

VALUES = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63 - 1, -(2**63), 0.5, 1e308, "", "a", "\0", "é" * 300, "../../x", "🙂"),
    *("tinker://../weights/a", "tinker://x:train:0/weights/..", [], [[]], [None], {}, {"a": {}}, ["x"] * 3, [1] * 9),
]
ROUTES = [route for route in JSON_BODIES if route not in ("retrieve_future", "sessions/session-1/finish")]


async def start(client: httpx2.AsyncClient, names: dict[str, str]) -> dict[str, str]:
    """Create a session, a model and a sampling session, and return the ids that replace those of the bodies."""

    async def post(route: str, body: Any) -> Any:
        return (await client.post(f"/api/v1/{route}", json=body)).json()

    session = (await post("create_session", JSON_BODIES["create_session"]))["session_id"]
    created = {**JSON_BODIES["create_model"], "session_id": session, "base_model": names["base_model"]}
    model = (await post("create_model", created))["model_id"]
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": names["base_model"]}
    sampler = (await post("create_sampling_session", sampling))["sampling_session_id"]
    return {"session-1": session, "s:train:0": model, "s:sample:0": sampler, "tiny": names["base_model"]}


def renamed(value: Any, names: dict[str, str]) -> Any:
    """Return a body with the ids of a session."""
    if isinstance(value, dict):
        return {key: renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


async def resolve(client: httpx2.AsyncClient, answer: httpx2.Response) -> None:
    """Check an answer, and wait for the future that it names."""
    assert answer.status_code < 500, answer.text
    form = answer.json() if answer.status_code == 200 else None
    if not isinstance(form, dict) or "request_id" not in form:
        return
    for _ in range(20):
        result = await client.post("/api/v1/retrieve_future", json={"request_id": form["request_id"]})
        assert result.status_code in (200, 404, 410), result.text
        if "try_again" not in result.text:
            return
    raise AssertionError(f"no result: {answer.request.url} {answer.request.content[:500]!r}")


@pytest.mark.parametrize("seed", range(2))
def test_every_future_is_resolved(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        async with (
            serving(tmp_path, sampling=FakeSampling(), gap_timeout_s=0.2) as service,
            client_of(service, hold_s=0.5) as client,
        ):
            base_model = (await service.capabilities())["supported_models"][0]["model_name"]
            for _ in range(5):
                names = await start(client, {"base_model": base_model})
                sent = []
                for number in range(25):
                    route = rng.choice(ROUTES)
                    body = renamed(JSON_BODIES[route], names)
                    if "seq_id" in body:
                        body["seq_id"] = number + 1
                    path = rng.choice(places(body))
                    sent.append(await client.post(f"/api/v1/{route}", json=replaced(body, path, rng.choice(VALUES))))
                    # Of the protobuf form, one byte is another.
                    message = bytearray(
                        cross_entropy_request(model_id=names["s:train:0"], seq_id=number + 100).SerializeToString()
                    )
                    message[rng.randrange(len(message))] = rng.randrange(256)
                    sent.append(await client.post("/api/v1/forward_backward", content=bytes(message), headers=PROTOBUF))
                for answer in sent:
                    await resolve(client, answer)
                assert (await client.get("/metrics")).status_code == 200
            assert service.parts.trouble() is None

    asyncio.run(run())
