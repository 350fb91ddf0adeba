"""Damaged bodies on every route: no answer of status 500 or above, and every accepted request has a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import httpx2
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.tests.tinker.api.bodies import JSON_BODIES, PROTOBUF, cross_entropy_request
from areal.tests.tinker.api.fuzz import places, replaced
from areal.tests.tinker.api.stand_in import StandInService, client_of

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
REAL = cross_entropy_request().SerializeToString()
HOSTILE_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "",
            "../../etc/passwd",
            "a\0b",
            "\ud800",
            "é" * 5000,
            "tinker://../weights/..",
            -1,
            0,
            2**63,
            [],
            {},
            [[]],
            {"a": None},
        ]
    ),
)


def check(send: Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]]) -> None:
    """Send a request. The answer says what is wrong, or names a result that is there."""

    async def run() -> None:
        async with client_of(StandInService(), hold_s=0.05) as client:
            answer = await send(client)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]
            elif "request_id" in (form := answer.json() or {}) and "type" not in form:
                result = await client.post("/api/v1/retrieve_future", json={"request_id": form["request_id"]})
                assert result.status_code == 200, result.text
                assert "try_again" not in result.text

    asyncio.run(run())


def mutated(data: st.DataObject, body: bytes) -> bytes:
    """Return the body with some bytes changed, removed or added."""
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        kind = data.draw(st.sampled_from(["change", "remove", "insert", "cut", "repeat"]))
        if kind == "change" and damaged:
            damaged[place] = data.draw(st.integers(0, 255))
        elif kind == "remove":
            del damaged[place : place + data.draw(st.integers(1, 8))]
        elif kind == "insert":
            damaged[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "cut":
            del damaged[place:]
        else:
            damaged += damaged[place:]
    return bytes(damaged[:100_000])


@EXAMPLES
@given(
    data=st.data(),
    compressed=st.booleans(),
    inner=st.booleans(),
    route=st.sampled_from(["forward_backward", "forward"]),
)
def test_protobuf_and_zstd(data: st.DataObject, compressed: bool, inner: bool, route: str) -> None:
    """The message is damaged, or the compressed frame is."""
    headers = {**PROTOBUF, **({"Content-Encoding": "zstd"} if compressed else {})}
    if compressed:
        body = zstandard.compress(mutated(data, REAL)) if inner else mutated(data, zstandard.compress(REAL))
    else:
        body = mutated(data, REAL)
    check(lambda client: client.post(f"/api/v1/{route}", content=body, headers=headers))


@EXAMPLES
@given(data=st.data(), route=st.sampled_from(sorted(JSON_BODIES)), text=st.booleans())
def test_json(data: st.DataObject, route: str, text: bool) -> None:
    """A value of a real body is replaced, or the text is damaged."""
    body = JSON_BODIES[route]
    body = replaced(body, data.draw(st.sampled_from(places(body))), data.draw(HOSTILE_VALUES))
    content = json.dumps(body).encode()
    if text:
        content = mutated(data, content)
    check(lambda client: client.post(f"/api/v1/{route}", content=content, headers={"Content-Type": "application/json"}))


PATHS = (
    "sessions/{}",
    "samplers/{}",
    "training_runs/{}",
    "training_runs/{}/checkpoints",
    "training_runs/{}/checkpoints/{}/{}/archive",
    "training_runs/{}/checkpoints/{}/{}/external_weights_urls",
)


@EXAMPLES
@given(data=st.data(), path=st.sampled_from(PATHS), method=st.sampled_from(["GET", "DELETE", "PUT", "POST", "PATCH"]))
def test_paths_and_queries(data: st.DataObject, path: str, method: str) -> None:
    """Names in a path, and numbers of a page, are anything."""
    anything = st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=12), st.sampled_from(["..", "a\0b", "\xff", "x" * 5000])
    )
    filled = path.format(*(quote(data.draw(anything), safe="") for _ in range(path.count("{}"))))
    query = {name: str(data.draw(HOSTILE_VALUES)).encode("utf-8", "replace").decode() for name in ("limit", "offset")}
    check(lambda client: client.request(method, f"/api/v1/{filled}", params=query))
