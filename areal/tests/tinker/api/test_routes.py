"""Answers of the routes: statuses, typed errors, futures, keys, links, metrics."""

from __future__ import annotations

import asyncio
import io
import logging
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal.tests.tinker.api.bodies import JSON_BODIES, PROTOBUF, cross_entropy_request
from areal.tests.tinker.api.stand_in import StandInService, client_of
from areal.tests.tinker.api.tenants import user
from areal.tinker.api import wire_pb2
from areal.tinker.api.context import LinkSigner
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.api.routes.queued import INLINE_RESULT_BYTES
from areal.tinker.service.requests import Outcome
from areal.tinker.service.verbs.forward_backward import Forward, ForwardBackward
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.verb import RefusedRequest
from areal.tinker.service.verbs.weights import LoadWeights, SaveExternal

Run = Callable[[httpx2.AsyncClient], Awaitable[Any]]
ACCEPT = {"Accept": "application/x-protobuf, application/json"}
NOT_OFFERED = ["auth/token"]


def with_client(function: Run, service: StandInService | None = None, **settings: Any) -> Any:
    async def run() -> Any:
        async with client_of(service or StandInService(), **settings) as client:
            return await function(client)

    return asyncio.run(run())


def posted(route: str, body: Any, service: StandInService | None = None, **settings: Any) -> httpx2.Response:
    return with_client(lambda client: client.post(f"/api/v1/{route}", json=body), service, **settings)


def test_every_route_accepts_its_body() -> None:
    async def run(client: httpx2.AsyncClient) -> dict[str, int]:
        return {
            route: (await client.post(f"/api/v1/{route}", json=body)).status_code for route, body in JSON_BODIES.items()
        }

    wrong = {route: status for route, status in with_client(run).items() if status != 200}
    assert wrong == {"retrieve_future": 410, "auth/token": 404}


def test_listing_routes() -> None:
    async def run(client: httpx2.AsyncClient) -> None:
        paths = (
            "sessions sessions/session-1 sessions/x/trace_export get_server_capabilities healthz audit samplers/x training_runs"
            " training_runs/r/checkpoints checkpoints billing/usage/events billing/usage/checkpoints/current"
        )
        for path in paths.split():
            assert (await client.get(f"/api/v1/{path}?limit=20&offset=0")).status_code == 200, path
        assert (await client.get("/api/v1/training_runs?limit=0")).status_code == 422
        assert (await client.get("/openapi.json")).json()["info"]["title"] == "areal server"

    with_client(run)


def test_checkpoint_routes_name_the_checkpoint() -> None:
    service = StandInService()

    async def run(client: httpx2.AsyncClient) -> None:
        path = "/api/v1/training_runs/s:train:0/checkpoints/weights/publish"
        for answer in (
            await client.put(f"{path}/ttl", json={"ttl_seconds": None}),
            await client.post(f"{path}/publish", json={}),
            await client.delete(f"{path}/publish"),
            await client.delete(path),
        ):
            assert answer.status_code == 200

    with_client(run, service)
    name = ("s:train:0", "weights/publish")
    expected = [("set_ttl", *name, None), ("publish", *name), ("unpublish", *name), ("delete_checkpoint", *name)]
    assert service.calls == expected


# ---- requests


def test_load_weights_has_two_forms() -> None:
    service = StandInService()
    posted("load_weights", JSON_BODIES["load_weights"], service)
    posted("load_weights", {"model_id": "m", "seq_id": 1, "path": "tinker://r/weights/a", "optimizer": False}, service)
    created, loaded = service.submitted
    assert isinstance(created, CreateModel)
    assert (created.model_seq_id, created.path, created.optimizer) == (1, "tinker://r/weights/a", True)
    assert isinstance(loaded, LoadWeights)
    assert (loaded.model_id, loaded.optimizer) == ("m", False)


def test_an_unknown_field_is_refused_in_its_turn_unless_it_is_off() -> None:
    service = StandInService()
    body = JSON_BODIES["optim_step"]
    posted("optim_step", {**body, "later_option": False}, service)
    posted("optim_step", {**body, "later_option": True}, service)
    posted("save_weights_for_sampler", {**JSON_BODIES["save_weights_for_sampler"], "kind": "inflight"}, service)
    accepted, refused, inflight = service.submitted
    assert not isinstance(accepted, RefusedRequest)
    assert isinstance(refused, RefusedRequest)
    assert (refused.seq_id, "later_option" in refused.message) == (4, True)
    assert isinstance(inflight, RefusedRequest)
    for route in ("asample", "create_model", "load_weights", "create_sampling_session"):  # in no turn of a model
        answer = posted(route, {**JSON_BODIES[route], "later_option": 2})
        assert (answer.status_code, "later_option" in answer.json()["error"]) == (422, True), route


RECIPIENTS = {"age_encryption_recipients": ["age1a", "ssh-rsa b"]}
WRONG_FIELDS = {
    "save_weights": {"path": "a\0b"},
    "save_weights_for_sampler": {"ttl_seconds": 10**30},
    "load_weights": {"path": "x" * 5000},
    "optim_step": {"adam_params": {"learning_rate": "high"}},
    "forward": {"forward_input": {"data": [], "loss_fn": "x" * 5000}},
    "forward_backward": {"forward_backward_input": None},
}


@pytest.mark.parametrize("route", WRONG_FIELDS)
def test_a_wrong_field_fails_in_its_turn(route: str) -> None:
    """An answer of status 422 would leave a gap, for which all later requests of the model would wait."""
    service = StandInService()
    answer = posted(route, {"model_id": "s:train:0", "seq_id": 5, **WRONG_FIELDS[route]}, service)
    assert answer.status_code == 200
    (refused,) = service.submitted
    assert isinstance(refused, RefusedRequest)
    assert (refused.model_id, refused.seq_id) == ("s:train:0", 5)
    assert next(iter(WRONG_FIELDS[route])) in refused.message
    # Without a place in the order there is no gap.
    assert posted(route, {"model_id": "s:train:0", **WRONG_FIELDS[route]}).status_code == 422


def test_an_export_names_its_recipients() -> None:
    service = StandInService()
    body = JSON_BODIES["save_weights_external"]
    for given, keys in (({}, ()), ({"age_encryption_recipients": None}, ()), (RECIPIENTS, ("age1a", "ssh-rsa b"))):
        posted("save_weights_external", {**body, **given}, service)
        request = service.submitted.pop()
        assert isinstance(request, SaveExternal)
        assert request.age_encryption_recipients == keys


def test_a_repeated_request_has_the_same_digest() -> None:
    service = StandInService()
    for _ in range(2):
        posted("optim_step", JSON_BODIES["optim_step"], service)
    posted("optim_step", {**JSON_BODIES["optim_step"], "adam_params": {"learning_rate": 2e-3}}, service)
    first, again, other = (request.digest for request in service.submitted)
    assert first == again != other


@pytest.mark.parametrize(("route", "verb"), [("forward", Forward), ("forward_backward", ForwardBackward)])
def test_a_message_to_forward_adds_no_gradient(route: str, verb: type[ForwardBackward]) -> None:
    service, body = StandInService(), cross_entropy_request().SerializeToString()
    with_client(lambda client: client.post(f"/api/v1/{route}", content=body, headers=PROTOBUF), service)
    assert [type(request) for request in service.submitted] == [verb]


# ---- futures


def test_results_by_what_the_client_accepts() -> None:
    async def run(client: httpx2.AsyncClient) -> None:
        body = cross_entropy_request().SerializeToString()
        future = (await client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)).json()
        assert future["model_id"] == "s:train:0"
        wanted = {"request_id": future["request_id"], "allow_metadata_only": True}
        answer = await client.post("/api/v1/retrieve_future", json=wanted, headers=ACCEPT)
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert wire_pb2.ForwardBackwardOutput.FromString(answer.content).metrics["loss:sum"] == 2.0
        form = (await client.post("/api/v1/retrieve_future", json=wanted)).json()
        assert form["loss_fn_outputs"][0]["logprobs"]["data"] == [-1.0, -1.5, -2.0]
        sample = (await client.post("/api/v1/asample", json=JSON_BODIES["asample"])).json()
        assert len(sample["sample_sequence_ids"]) == 2
        answer = await client.post("/api/v1/retrieve_future", json={"request_id": sample["request_id"]}, headers=ACCEPT)
        assert len(wire_pb2.SampleResponse.FromString(answer.content).sequences) == 2

    with_client(run)


def test_a_large_result_is_announced_by_its_size() -> None:
    service = StandInService()
    for name, size in (("a", INLINE_RESULT_BYTES), ("b", INLINE_RESULT_BYTES + 1)):
        service.outcomes[name] = Outcome("done", "OptimStep", {"metrics": {}}, result_bytes=size)
    wanted = {"request_id": "b", "allow_metadata_only": True}
    announced = {"status": "complete_metadata", "response_payload_size": INLINE_RESULT_BYTES + 1}
    assert posted("retrieve_future", wanted, service).json() == announced
    assert posted("retrieve_future", {"request_id": "b"}, service).json() == {"metrics": {}}
    assert posted("retrieve_future", wanted | {"request_id": "a"}, service).json() == {"metrics": {}}


def test_states_of_a_future() -> None:
    service = StandInService()
    service.outcomes["bad"] = Outcome("failed", "OptimStep", None, "rank is wrong", "user")
    assert posted("retrieve_future", {"request_id": "bad"}, service).json() == {
        "error": "rank is wrong",
        "category": "user",
    }
    assert posted("retrieve_future", {"request_id": "lost"}).status_code == 410
    assert posted("retrieve_future", {"request_id": "unknown"}).status_code == 404
    waiting = posted("retrieve_future", {"request_id": "waits"}, service, hold_s=0.1).json()
    assert service.waits == [0.1]
    assert waiting == {"type": "try_again", "request_id": "waits", "queue_state": "paused_capacity"}


def test_held_requests_are_answered_when_the_server_stops() -> None:
    async def run(client: httpx2.AsyncClient) -> Any:
        app = client._transport.app  # type: ignore[attr-defined]
        held = asyncio.ensure_future(client.post("/api/v1/retrieve_future", json={"request_id": "waits"}))
        await asyncio.sleep(0.1)
        app.state.context.stopping.set()
        return (await asyncio.wait_for(held, 5)).json()

    assert with_client(run)["type"] == "try_again"


# ---- errors


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("session_heartbeat", {"session_id": "other"}, 410),
        ("unload_model", {"model_id": "missing"}, 404),
        ("asample", {**JSON_BODIES["asample"], "num_samples": 1000}, 429),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0, "model_path": "/etc"}, 400),
        ("create_model", {"session_id": 3}, 422),
        ("create_model", {**JSON_BODIES["create_model"], "session_id": "a\0b"}, 422),
        ("optim_step", {"model_id": "m", "seq_id": 2**70}, 422),
        ("no_such_route", {}, 404),
        ("sessions/search", {}, 404),
    ],
)
def test_errors_have_a_message_and_a_category(route: str, body: dict[str, Any], status: int) -> None:
    answer = posted(route, body)
    assert (answer.status_code, answer.json()["category"]) == (status, "user")
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "content", [b"{", b"[" * 100_000, b'{"session_id": NaN}', b"\xff\xfe", b'{"session_id": 1' + b"0" * 6000 + b"}"]
)
def test_bodies_that_are_no_json_are_refused(content: bytes) -> None:
    async def run(client: httpx2.AsyncClient) -> None:
        for route in ("session_heartbeat", "forward", "forward_backward"):
            answer = await client.post(
                f"/api/v1/{route}", content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in (400, 422), route
            assert answer.json()["category"] == "user"

    with_client(run)


def test_an_unexpected_error_shows_no_internals(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = with_client(lambda client: client.get("/api/v1/training_runs/broken"))
    assert (answer.status_code, answer.json()["category"]) == (500, "server")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in answer.text
    assert answer.headers["x-request-id"] in caplog.text


# ---- keys

KEY = "tml-0123456789abcdef"
USER = user("ann", KEY)


def test_keys(caplog: pytest.LogCaptureFixture) -> None:
    async def run(client: httpx2.AsyncClient) -> None:
        async def status(path: str, **headers: str) -> int:
            return (await client.get(path, headers=headers)).status_code

        for path in ("/api/v1/sessions", "/", "/status", "/metrics", "/docs", "/openapi.json"):
            assert await status(path) == 401, path
            assert await status(path, **{"X-API-Key": KEY[:-1]}) == 401
            assert await status(path, **{"X-API-Key": KEY}) == 200
        assert await status("/api/v1/sessions", **{"X-API-Key": ""}) == 401
        assert await status("/api/v1/sessions", **{"Authorization": f"Bearer {KEY}"}) == 200
        assert await status("/api/v1/sessions", **{"Authorization": "Basic !!"}) == 401
        assert (await client.get("/status", auth=("anyone", KEY))).status_code == 200
        assert await status("/api/v1/healthz") == 200
        # A challenge would make the SDK exchange its key for a token.
        api, page = await client.get("/api/v1/sessions"), await client.get("/")
        assert "www-authenticate" not in api.headers
        assert page.headers["www-authenticate"].startswith("Basic")
        assert api.json()["category"] == "user"

    with caplog.at_level(logging.DEBUG):
        with_client(run, users=[user("other", "tml-another-key-0000"), USER])
    assert KEY not in caplog.text


def test_the_key_is_checked_before_the_body_is_read() -> None:
    async def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    answer = with_client(lambda client: client.post("/api/v1/asample", content=body()), users=[USER])
    assert answer.status_code == 401


def test_settings_are_checked() -> None:
    for wrong in ({"hold_s": 45.0}, {"users": [USER, USER]}, {"max_body_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ApiSettings(**wrong)


# ---- downloads


def saved(folder: Path) -> StandInService:
    (folder / "sub").mkdir()
    (folder / "adapter.bin").write_bytes(bytes(range(256)) * 5)
    (folder / "sub" / "config.json").write_text("{}")
    return StandInService(folder)


def test_archive_and_single_files(tmp_path: Path) -> None:
    async def run(client: httpx2.AsyncClient) -> None:
        path = "/api/v1/training_runs/s:train:0/checkpoints/weights"
        assert (await client.get(f"{path}/other/archive", headers={"X-API-Key": KEY})).status_code == 404
        link = (await client.get(f"{path}/saved/archive", headers={"X-API-Key": KEY})).json()
        answer = await client.get(link["url"])  # without a key
        assert answer.status_code == 200
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            assert archive.getnames() == ["adapter.bin", "sub/config.json"]
            member = archive.extractfile("adapter.bin")
            assert member is not None
            assert member.read() == bytes(range(256)) * 5
        urls = (await client.get(f"{path}/saved/external_weights_urls", headers={"X-API-Key": KEY})).json()["urls"]
        assert (await client.get(urls["sub/config.json"])).text == "{}"
        # The signature covers the checkpoint, the file and the expiry.
        url = urls["adapter.bin"]
        changes = [
            ("adapter.bin", "sub%2Fconfig.json"),
            ("saved", "other"),
            ("expires=", "expires=9"),
            ("signature=", "signature=0"),
        ]
        for old, new in (*changes, ("adapter.bin", "..%2F..%2Fetc%2Fpasswd")):
            assert (await client.get(url.replace(old, new))).status_code in (403, 422), new

    with_client(run, saved(tmp_path), users=[USER])


def test_links_expire() -> None:
    signer = LinkSigner(lifetime_s=-1)
    query = signer.sign("a", "b")
    assert not signer.accepts(query["expires"], query["signature"], "a", "b")
    signer = LinkSigner(lifetime_s=60)
    query = signer.sign("a", "b")
    assert signer.accepts(query["expires"], query["signature"], "a", "b")
    assert not signer.accepts(query["expires"], query["signature"], "a", "c")
    assert not LinkSigner(60).accepts(query["expires"], query["signature"], "a", "b")


# ---- monitoring


def test_health() -> None:
    service = StandInService()
    service.is_healthy = False
    answer = with_client(lambda client: client.get("/api/v1/healthz"), service)
    assert (answer.status_code, answer.json().get("status")) == (503, None)


def test_metrics() -> None:
    async def run(client: httpx2.AsyncClient) -> str:
        await client.post("/api/v1/session_heartbeat", json={"session_id": "session-1"})
        await client.get("/api/v1/training_runs/some-run")
        await client.get("/somewhere")
        return (await client.get("/metrics")).text

    text = with_client(run)
    for line in (
        'areal_http_requests_total{route="/api/v1/session_heartbeat",status="200"} 1.0',
        'areal_http_requests_total{route="/api/v1/training_runs/{run_id}",status="404"} 1.0',
        'areal_http_requests_total{route="none",status="404"} 1.0',
        'areal_queue_requests{kind="training"} 2.0',
        "areal_healthy 1.0",
        "areal_models 1.0",
        'areal_requests_total{kind="forward",result="refused"} 2.0',
        'areal_backend_seconds_total{kind="forward"} 0.5',
        'areal_tokens_total{kind="training"} 900.0',
        'areal_memory_bytes{state="free"} 5.36870912e+09',
    ):
        assert line in text
