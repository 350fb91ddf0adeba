"""Users of a server: what belongs to one does not exist for another, on any route; public checkpoints; quotas; the key file."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from alembic import command
from fastapi import APIRouter, FastAPI
from sqlalchemy import text

from areal.tests.tinker.api.stand_in import StandInService
from areal.tests.tinker.api.tenants import API, USERS, Client, body_of, own, tenants, user
from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.api.key_file import User, read_users
from areal.tinker.service.store.database import Database
from areal.tinker.service.tenants.caller import Caller, Quotas

IDENTIFIERS = frozenset(
    ["session_id", "model_id", "run_id", "sampling_session_id", "sampler_id", "request_id", "model_path", "tinker_path"]
)
"""Fields of bodies and parameters of paths that name an object of an owner."""

OTHERS = frozenset(
    [
        "project_id",
        "model_seq_id",
        "seq_id",
        "sampling_session_seq_id",
        "kind",
        "name",
        "limit",
        "offset",
        "file",
        "expires",
        "signature",
    ]
)
"""Those that look like an identifier, or are in a path, and name none."""

NO_OBJECTS = frozenset({"/sessions/{session_id}/project", "/telemetry"})
"""Routes that answer without a look at the identifier, and with no object."""

LOADS = f"{API}/load_weights"


def fields_of(app: FastAPI) -> Iterator[tuple[str, str, set[str]]]:
    """Yield method, path and the names of fields and parameters of each route that needs a key."""
    described = app.openapi()
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            if "$ref" in schema:
                schema = described["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
            names |= set(schema.get("properties", ()))
            if not path.startswith("/download/"):
                yield method.upper(), path, names


def cases(app: FastAPI) -> list[tuple[str, str, str]]:
    """Method, path and identifier of each call that another user must not make."""
    calls = []
    for method, path, names in fields_of(app):
        unknown = {n for n in names if n.endswith(("_id", "_path")) or f"{{{n}}}" in path} - IDENTIFIERS - OTHERS
        assert not unknown, (
            f"{method} {path}: say in IDENTIFIERS or in OTHERS whether {sorted(unknown)} name objects of an owner"
        )
        named = (names & IDENTIFIERS) | ({"path"} if path == LOADS else set())
        if path.removeprefix(API) not in NO_OBJECTS:
            calls += [(method, path, identifier) for identifier in sorted(named)]
    return calls


APP = create_app(cast(Any, StandInService()), ApiSettings())
CASES = cases(APP)


def request_of(method: str, path: str, identifier: str, values: dict[str, str], seq: int) -> tuple[str, str, Any]:
    """Return method, path and body of a request that has the identifier, and others as far as it needs them."""
    fields = next(names for each, place, names in fields_of(APP) if (each, place) == (method, path)) & IDENTIFIERS
    body: dict[str, Any] = body_of(path.removeprefix(f"{API}/").replace("{session_id}", "session-1"))
    # A sample names its weights in one way. A checkpoint is loaded into a model, or makes one.
    if path == f"{API}/asample":
        fields = {identifier}
        del body["sampling_session_id"]
    elif path == LOADS and identifier != "session_id":
        fields = {"model_id", "path"}
        body = {"seq_id": seq}
    body |= {name: values[name] for name in fields if f"{{{name}}}" not in path}
    for name, value in {**values, "kind": "weights", "name": "mine"}.items():
        path = path.replace(f"{{{name}}}", value)
    return method, path, None if method == "GET" else body


def test_identifiers_of_another_user_are_unknown_on_every_route(tmp_path: Path) -> None:
    """A route that forgets the check fails, and one with an identifier that this test does not know."""
    assert len(CASES) >= 30

    async def main() -> None:
        async with tenants(tmp_path) as (ann, bob, root):
            hers, his = await own(ann), await own(bob)
            session, seq = hers["session_id"], 3
            forged = {name: value.replace(session, "0" * 36) for name, value in hers.items()} | {"request_id": "0" * 32}
            for method, path, identifier in CASES:
                answers = []
                for foreign in (hers, forged):
                    values = {**his, identifier: foreign[identifier]}
                    answer = await bob.send(*request_of(method, path, identifier, values, seq))
                    seq += path == LOADS and identifier == "path"
                    answers.append((answer.status_code, answer.text.replace(foreign[identifier], "ID")))
                assert answers[0][0] == 404, (method, path, identifier, answers[0])
                # Nothing tells an object of another user from none.
                assert answers[0] == answers[1], (method, path, identifier)
            # All is still there, for its owner and for an administrator.
            for client in (ann, root):
                assert (await client.get(f"training_runs/{hers['model_id']}"))["model_owner"] == "ann"
                assert len((await client.get(f"training_runs/{hers['model_id']}/checkpoints"))["checkpoints"]) == 2
            await ann.post("session_heartbeat", session_id=session)
            await ann.done("optim_step", model_id=hers["model_id"], seq_id=3, adam_params={})
            # The refused loads of the other user have left no gap.
            await bob.done("optim_step", model_id=his["model_id"], seq_id=seq, adam_params={})

    asyncio.run(main())


def test_a_new_identifier_is_named() -> None:
    app, router = create_app(cast(Any, StandInService()), ApiSettings()), APIRouter()

    @router.get("/api/v1/things/{thing_id}")
    async def thing(thing_id: str) -> None:
        """Describe a thing."""

    app.include_router(router)
    with pytest.raises(AssertionError, match=r"GET /api/v1/things/\{thing_id\}: say in IDENTIFIERS or in OTHERS"):
        cases(app)


def test_listings_show_the_objects_of_the_caller(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (ann, bob, root):
            hers, his = await own(ann), await own(bob)
            for client, mine in ((ann, [hers]), (bob, [his]), (root, [his, hers])):
                runs = {each["model_id"] for each in mine}
                sessions = await client.get("sessions")
                assert set(sessions["sessions"]) == {each["session_id"] for each in mine}
                assert sessions["cursor"]["total_count"] == len(mine)
                listed = await client.get("training_runs")
                assert {run["training_run_id"] for run in listed["training_runs"]} == runs
                assert listed["cursor"]["total_count"] == len(mine)
                stored = await client.get("checkpoints")
                assert {each["tinker_path"].split("/")[2] for each in stored["checkpoints"]} == runs
                assert stored["cursor"]["total_count"] == 2 * len(mine)
                status = (await client.send("GET", "/status")).json()
                assert {model["model_id"] for model in status["models"]} == runs
                assert set(status["losses"]) == {run["training_run_id"] for run in status["runs"]} == runs
                assert status["checkpoint_count"] == 2 * len(mine)
            assert "model_id" not in (await bob.send("GET", "/metrics")).text

    asyncio.run(main())


def test_a_public_checkpoint_is_read_by_all_and_changed_by_its_owner(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (ann, bob, _):
            hers, his = await own(ann), await own(bob)
            checkpoint = f"{API}/training_runs/{hers['run_id']}/checkpoints/weights/mine"
            sampled = checkpoint.replace("/weights/", "/sampler_weights/")
            info = {"tinker_path": hers["path"]}
            place = {"session_id": his["session_id"], "path": hers["path"], "optimizer": True}
            for path in (checkpoint, sampled):
                assert (await ann.send("POST", f"{path}/publish", {})).status_code == 200
            # Read.
            assert (await bob.send("POST", f"{API}/weights_info", info)).status_code == 200
            link = (await bob.send("GET", f"{checkpoint}/archive")).json()["url"]
            assert (await bob.send("GET", link)).status_code == 200
            assert (await bob.done("load_weights", **place, model_seq_id=1))[
                "model_id"
            ] == f"{his['session_id']}:train:1"
            sampler = {"session_id": his["session_id"], "sampling_session_seq_id": 1, "model_path": hers["model_path"]}
            await bob.post("create_sampling_session", **sampler)
            # Not changed, and not listed.
            for method, path in (
                ("DELETE", checkpoint),
                ("DELETE", f"{checkpoint}/publish"),
                ("PUT", f"{checkpoint}/ttl"),
            ):
                assert (await bob.send(method, path, {"ttl_seconds": 60})).status_code == 404, path
            assert len((await bob.get("checkpoints"))["checkpoints"]) == 2
            # Private again.
            await ann.send("DELETE", f"{checkpoint}/publish")
            assert (await bob.send("POST", f"{API}/weights_info", info)).status_code == 404
            assert (await bob.send("POST", LOADS, {**place, "model_seq_id": 2})).status_code == 404

    asyncio.run(main())


def test_rows_from_before_there_were_owners_belong_to_administrators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = command.upgrade

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(command, "upgrade", lambda config, revision: upgrade(config, "0001"))
            database = Database(f"sqlite:///{tmp_path}/tinker.db", 5.0)
            await database.open()
            row = "INSERT INTO sessions (id, state, created) VALUES ('old', 'live', 1.0)"
            await database.write(lambda connection: connection.execute(text(row)))
            await database.close()
        async with tenants(tmp_path) as (ann, _, root):
            for client, sessions, status in ((root, ["old"], 200), (ann, [], 404)):
                assert (await client.get("sessions"))["sessions"] == sessions
                answer = await client.send("POST", f"{API}/session_heartbeat", {"session_id": "old"})
                assert answer.status_code == status

    asyncio.run(main())


# ---- quotas


def with_quotas(root: Path, function: Callable[[Client, Client], Awaitable[None]], **quotas: int) -> None:
    """Run a function with a user who has quotas, and another who has none."""

    async def main() -> None:
        limited = User.model_validate({"name": "ann", "key": "tml-key-of-ann", **quotas})
        async with tenants(root, (limited, *USERS[1:])) as (ann, bob, _):
            await function(ann, bob)

    asyncio.run(main())


def test_quota_of_live_adapters(tmp_path: Path) -> None:
    async def check(ann: Client, bob: Client) -> None:
        session, other = [(await client.post("create_session"))["session_id"] for client in (ann, bob)]
        first = await ann.model(session)
        wanted = {"session_id": session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 4}}
        error = await ann.failed("create_model", **wanted)
        assert error["category"] == "user"
        assert "ann has 1 live models, and the quota is 1" in error["error"]
        for number in range(2):
            await bob.model(other, number)
        await ann.done("unload_model", model_id=first, seq_id=1)
        await ann.done("create_model", **{**wanted, "model_seq_id": 2})

    with_quotas(tmp_path, check, max_adapters=1)


def test_quota_of_stored_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save takes 600 KiB of one MiB."""
    monkeypatch.setattr("areal.tinker.service.store.files.CheckpointFiles.size", lambda self, folder: 600 * 1024)

    async def check(ann: Client, bob: Client) -> None:
        session = (await ann.post("create_session"))["session_id"]
        model = await ann.model(session)
        await ann.done("save_weights", model_id=model, seq_id=1, path="a")
        saves = [
            ("save_weights", {"path": "b"}),
            ("save_weights_for_sampler", {"path": "b"}),
            ("save_weights_for_sampler", {"sampling_session_seq_id": 0}),
        ]
        for seq, (route, fields) in enumerate(saves, 2):
            error = await ann.failed(route, model_id=model, seq_id=seq, **fields)
            assert error["category"] == "user"
            assert "ann stores 614400 bytes, and the quota is 1048576" in error["error"]
        # What is replaced does not count. What was refused takes no space.
        await ann.done("save_weights", model_id=model, seq_id=5, path="a", overwrite=True)
        assert len([path for path in tmp_path.glob("checkpoints/*/*/*") if path.is_dir()]) == 1
        # A snapshot counts, too.
        await ann.send("DELETE", f"{API}/training_runs/{model}/checkpoints/weights/a")
        await ann.done("save_weights_for_sampler", model_id=model, seq_id=6, sampling_session_seq_id=1)
        assert "stores 614400 bytes" in (await ann.failed("save_weights", model_id=model, seq_id=7, path="c"))["error"]
        other = (await own(bob))["model_id"]
        await bob.done("save_weights", model_id=other, seq_id=3, path="b")

    with_quotas(tmp_path, check, max_stored_mib=1)


def test_quota_of_queued_tokens(tmp_path: Path) -> None:
    async def check(ann: Client, bob: Client) -> None:
        session = (await ann.post("create_session"))["session_id"]
        model = await ann.model(session)
        inputs = {
            name: {"data": [1, 1, 1], "dtype": kind}
            for name, kind in (("target_tokens", "int64"), ("weights", "float32"))
        }
        datum = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": inputs}

        def request(seq: int, count: int = 1) -> dict[str, Any]:
            given = {"data": [datum] * count, "loss_fn": "cross_entropy"}
            return {"model_id": model, "seq_id": seq, "forward_backward_input": given}

        # Requests that wait for the first are accepted, and so is the first. Those of another model have no room.
        waiting = [await ann.post("forward_backward", **request(seq)) for seq in (2, 3, 4)]
        other = await ann.model(session, 1)
        answer = await ann.send("POST", f"{API}/forward_backward", request(2) | {"model_id": other})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "with 9 tokens wait or run, and the quota is 8" in answer.json()["error"]
        prompt = {
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "base_model": "base",
            "sampling_params": {"max_tokens": 2},
        }
        assert (await ann.send("POST", f"{API}/asample", prompt)).status_code == 429
        assert (await bob.send("POST", f"{API}/asample", prompt)).status_code == 200
        await ann.done("forward_backward", **request(1))
        for submitted in waiting:
            await ann.post("retrieve_future", request_id=submitted["request_id"])
        await ann.done("asample", **prompt)
        # One that can never run is refused for good.
        error = await ann.failed("forward_backward", **request(5, count=3))
        assert (error["category"], "the request has 9 tokens" in error["error"]) == ("user", True)
        error = await ann.failed("asample", **{**prompt, "num_samples": 4})
        assert (error["category"], "the request has 10 tokens" in error["error"]) == ("user", True)

    with_quotas(tmp_path, check, max_queued_tokens=8)


# ---- key file

DIGEST = hashlib.sha256(b"tml-key-of-bob").hexdigest()
FILE = f"""
[[users]]
name = "ann"
key = "tml-key-of-ann"
role = "admin"
max_stored_mib = 2
[[users]]
name = "bob"
key_sha256 = "{DIGEST}"
max_adapters = 1
max_queued_tokens = 7
"""


def test_users_of_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    ann, bob = read_users(file, "local")
    assert (ann.caller, ann.quotas) == (Caller("ann", admin=True), Quotas(2**21, None, None))
    assert (bob.caller, bob.quotas) == (Caller("bob"), Quotas(None, 1, 7))
    assert bob.digest == hashlib.sha256(b"tml-key-of-bob").digest()
    # A single key is an administrator's; each of several keys is a user's.
    file.write_text("\ntml-key-of-ann\n")
    assert [user.caller for user in read_users(file, "local")] == [Caller("local", admin=True)]
    file.write_text("tml-key-of-ann\ntml-key-of-bob\n")
    assert [user.caller for user in read_users(file, "local")][1] == Caller(f"key-{DIGEST[:12]}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (FILE, "", "users: Field required"),
        (FILE, "secret-key-of-ann", r"is no TOML .*name = \"ann\""),
        ("role", "rule", r"users\.0\.rule: Extra inputs"),
        ('"admin"', '"root"', r"users\.0\.role: Input should be 'user' or 'admin'"),
        ("tml-key-of-ann", "secret-key-of-ann", "the key of ann must begin with 'tml-'"),
        (f'key_sha256 = "{DIGEST}"', "", "bob needs one of key and key_sha256"),
        (DIGEST, "0" * 63, r"users\.1\.key_sha256"),
        ("= 7", "= -7", r"users\.1\.max_queued_tokens"),
    ],
)
def test_a_wrong_key_file_is_refused_without_its_keys(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        read_users(file, "local")
    assert str(caught.value).startswith("api_key_file=")
    assert "key-of" not in str(caught.value)


def test_two_users_with_one_name_or_key_are_refused() -> None:
    ann, bob = USERS[:2]
    for users, message in (
        ((ann, user("ann", "tml-another-key")), "ann, ann have the same name"),
        ((bob, User(name="zoe", key_sha256=DIGEST)), "bob, zoe have the same key"),
    ):
        with pytest.raises(ValueError, match=message):
            ApiSettings(users=users)
