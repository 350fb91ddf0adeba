"""Database: migrations, PostgreSQL, and the stored form of results."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text

from areal.tests.unit.tinker.service.crashes import check_after_crash, kill, start
from areal.tests.unit.tinker.service.fakes import (
    FakeSampling,
    FakeTraining,
    digest,
    done,
    new_model,
    outcome,
    sample,
    serving,
    settings,
    step,
    train,
)
from areal.tinker.backends.prepared import (
    PassResult,
    SampledAnswer,
    SamplingResult,
    TopLogprobs,
    decode_result,
    encode_result,
)
from areal.tinker.service.service import Service
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.tables import metadata
from areal.tinker.service.verbs.weights import SaveForSampler, SaveWeights

NO_POSTGRES = "needs the packages pgserver and psycopg, which the test extra installs where they have wheels"


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server that belongs to this module."""
    if importlib.util.find_spec("pgserver") is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip(NO_POSTGRES)
    pgserver = importlib.import_module("pgserver")
    # Under root the server runs as another user, and a pytest that starts removes the access of others to the directories of pytest.
    with tempfile.TemporaryDirectory(prefix="areal-postgres-") as parent:
        # The package allows ten seconds for the start, which is too short on a loaded machine.
        for attempts_left in (2, 1, 0):
            folder = Path(parent) / str(attempts_left)
            try:
                server = pgserver.get_server(folder, cleanup_mode="stop")
                break
            except subprocess.TimeoutExpired:
                if (folder / "postmaster.pid").exists():
                    os.kill(int((folder / "postmaster.pid").read_text().split()[0]), signal.SIGTERM)
                if not attempts_left:
                    raise
        yield server.get_uri()
        server.cleanup()


def fresh(url: str, name: str) -> str:
    """URL of a new, empty database of a server."""
    with create_engine(
        url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    ).connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return url.replace("/postgres?", f"/{name}?")


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(
        connection, opts={"compare_type": True, "include_name": lambda name, *_: name != "alembic_version"}
    )
    return compare_metadata(context, metadata)


async def check_migrations(url: str) -> None:
    """A new database has the tables of the package, and a second start changes nothing."""
    for _ in range(2):
        database = Database(url, 5.0)
        await database.open()
        assert await database.read(differences) == []
        assert await database.read(
            lambda c: c.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
        ) == ["0005"]
        await database.close()


def test_migrations_make_the_tables(tmp_path: Path) -> None:
    asyncio.run(check_migrations(f"sqlite:///{tmp_path}/x.db"))


def test_sqlite_uses_a_write_ahead_log(tmp_path: Path) -> None:
    async def main() -> None:
        database = Database(f"sqlite:///{tmp_path}/x.db", 5.0)
        await database.open()
        assert await database.read(lambda c: c.execute(text("PRAGMA journal_mode")).scalar()) == "wal"
        await database.close()

    asyncio.run(main())


def test_other_databases_are_refused() -> None:
    with pytest.raises(ValueError, match=r"database_url.*mysql"):
        asyncio.run(Database("mysql://x/y", 5.0).open())


def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")

    monkeypatch.setattr("areal.tinker.service.store.database.create_engine", missing)
    with pytest.raises(ValueError, match=r"database_url.*psycopg"):
        asyncio.run(Database("postgresql://u:secret@host/db", 5.0).open())


# ---------------------------------------------------------------------- PostgreSQL


def test_postgres_has_the_same_tables(postgres: str) -> None:
    asyncio.run(check_migrations(fresh(postgres, "migrations")))


def test_postgres_serves_and_keeps_everything(postgres: str, tmp_path: Path) -> None:
    url = fresh(postgres, "service")

    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), FakeSampling(), database_url=url) as service:
            session = await service.create_session(["a"], {"k": "v"}, display_name="x\x00y")
            model = await new_model(service, session)
            late = await service.submit(train(model, 2, first=2))
            passed = await service.submit(train(model, 1))
            assert (await service.submit(train(model, 1))) == passed
            for submitted in (passed, late):
                assert (await outcome(service, submitted)).state == "done"
            await done(service, step(model, 3, learning_rate=0.5))
            path = (await done(service, SaveWeights(model, 4, digest(4), path="one", user_metadata={"a": "b"})))["path"]
            snapshot = await done(service, SaveForSampler(model, 5, digest(5), sampling_session_seq_id=0))
            sampled = await service.submit(sample(snapshot["sampling_session_id"], 0))
            assert await service.submit(sample(snapshot["sampling_session_id"], 0)) == sampled
            assert (await outcome(service, sampled)).result.answers[0].logprobs[0] == 2.0
            await service.set_ttl(model, "weights/one", 3600)
            assert (await service.status())["checkpoint_count"] == 1
            # One owner here, too.
            with pytest.raises(
                RuntimeError, match=r"another server owns the database postgresql\+psycopg://…@/service"
            ):
                await Service(FakeTraining(), None, settings(tmp_path, database_url=url)).start()
        async with serving(tmp_path, FakeTraining(), FakeSampling(), database_url=url) as service:
            assert (await outcome(service, passed)).result.logprobs[0].shape == (3,)
            assert (await service.weights_info(path))["lora_rank"] == 4
            await service.heartbeat(session)
            await service.finish_session(session)

    asyncio.run(main())


def test_postgres_keeps_what_a_killed_server_acknowledged(postgres: str, tmp_path: Path) -> None:
    url = fresh(postgres, "crash")
    asyncio.run(check_after_crash(tmp_path, kill(start(tmp_path, url), 12), url))


# ---------------------------------------------------------------------- results


def test_results_are_read_as_they_were_stored() -> None:
    rows = [np.asarray([-1.0, np.nan], np.float32), np.zeros((3, 2), np.float32), np.zeros(0, np.float32)]
    read = decode_result(encode_result(PassResult(rows, {"loss:sum": 1.5, "x:mean": float("inf")})))
    assert isinstance(read, PassResult)
    assert read.metrics == {"loss:sum": 1.5, "x:mean": float("inf")}
    for before, after in zip(rows, read.logprobs, strict=True):
        np.testing.assert_array_equal(before, after, strict=True)
    assert list(decode_result(encode_result(PassResult([], {}))).logprobs) == []

    top = TopLogprobs(np.arange(4, dtype=np.int32).reshape(2, 2), np.full((2, 2), -1, np.float32))
    answers = [
        SampledAnswer("stop", np.asarray([1, 2], np.int32), np.asarray([-1, -2], np.float32), top),
        SampledAnswer("length", np.zeros(0, np.int32), np.zeros(0, np.float32)),
    ]
    for prompt, prompt_top in ((None, None), (np.asarray([np.nan, -1], np.float32), top)):
        sampled = decode_result(encode_result(SamplingResult(answers, prompt, prompt_top)))
        assert [a.stop_reason for a in sampled.answers] == ["stop", "length"]
        np.testing.assert_array_equal(sampled.answers[0].top.ids, top.ids, strict=True)
        assert sampled.answers[1].top is None
        assert sampled.answers[1].tokens.shape == (0,)
        assert (sampled.prompt_logprobs is None, sampled.prompt_top is None) == (prompt is None, prompt is None)
        if prompt is not None:
            np.testing.assert_array_equal(sampled.prompt_logprobs, prompt, strict=True)

    assert decode_result(encode_result({"path": "x", "n": [1, None]})) == {"path": "x", "n": [1, None]}


def test_writes_that_arrive_together_share_a_transaction_and_fail_alone(tmp_path: Path) -> None:
    begun: list[int] = []

    def store(value: int) -> Callable[[Connection], int]:
        def work(connection: Connection) -> int:
            # Each transaction is a new object.
            begun.append(id(connection.get_transaction()))
            connection.execute(text("INSERT INTO numbers VALUES (:value)"), {"value": value})
            return value

        return work

    async def scenario() -> list[object]:
        database = Database(f"sqlite:///{tmp_path / 'a.db'}", 20.0)
        await database.open()
        await database.write(lambda connection: connection.execute(text("CREATE TABLE numbers (n INTEGER UNIQUE)")))
        together = await asyncio.gather(*(database.write(store(value)) for value in (1, 2, 3)))
        assert together == [1, 2, 3]
        assert len(set(begun)) == 1
        mixed = await asyncio.gather(*(database.write(store(value)) for value in (4, 2, 5)), return_exceptions=True)
        rows = await database.read(lambda connection: connection.execute(text("SELECT n FROM numbers")).scalars().all())
        await database.close()
        return [mixed[0], type(mixed[1]).__name__, mixed[2], sorted(rows)]

    assert asyncio.run(scenario()) == [4, "IntegrityError", 5, [1, 2, 3, 4, 5]]
