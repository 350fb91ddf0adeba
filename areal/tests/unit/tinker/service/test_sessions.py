"""Sessions: heartbeats, the end by the client or by time, and what it releases."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal.tests.unit.tinker.service.fakes import (
    FakeSampling,
    FakeTraining,
    digest,
    done,
    eventually,
    new_model,
    outcome,
    refused,
    sample,
    serving,
    step,
    train,
)
from areal.tinker.backends.errors import BackendLostError, UserError
from areal.tinker.service.errors import NotFoundError, SessionOverError
from areal.tinker.service.recovery.survivors import MAX_ATTEMPTS
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.weights import SaveForSampler


def test_finish_releases_models_snapshots_and_requests(tmp_path: Path) -> None:
    async def main() -> None:
        training, sampling = FakeTraining(), FakeSampling()
        async with serving(tmp_path, training, sampling) as service:
            session, other = await service.create_session(["a"]), await service.create_session(["b"])
            model, kept = await new_model(service, session), await new_model(service, other)
            await done(service, SaveForSampler(model, 1, digest(1), sampling_session_seq_id=1))
            training.gate.clear()
            running = await service.submit(train(model, 2))
            queued = await service.submit(train(model, 3))
            waiting = await service.submit(train(model, 5))
            await asyncio.sleep(0.02)
            finished = asyncio.create_task(service.finish_session(session, {"type": "errored", "detail": "x"}))
            # Requests fail at once, while the backend still runs one.
            for submitted in (running, queued, waiting):
                answer = await outcome(service, submitted)
                assert (answer.state, answer.category) == ("failed", "user")
                assert "was finished by its client" in (answer.error or "")
            training.gate.set()
            await finished
            await eventually(lambda: set(training.models) == {kept})
            assert sampling.open_snapshots == {}
            # The first reason counts; the rest of the protocol sees that the session is over.
            await service.finish_session(session, {"type": "success"})
            with pytest.raises(SessionOverError):
                await service.heartbeat(session)
            for call in (service.finish_session, service.heartbeat, service.session):
                for name in ("unknown", model, kept):  # a model is no session
                    with pytest.raises(NotFoundError):
                        await call(name)
            with pytest.raises(SessionOverError):
                await service.submit(CreateModel(session, 3, digest(3), base_model="base", lora_config={"rank": 2}))
            assert "was released" in await refused(service, train(model, 7))
            # Others go on.
            await service.heartbeat(other)
            await done(service, train(kept, 1))

    asyncio.run(main())


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_an_end_that_fails_is_repeated_and_releases_all_it_can(tmp_path: Path, failures: int) -> None:
    async def main() -> None:
        training, sampling = FakeTraining(), FakeSampling()
        async with serving(tmp_path, training, sampling) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, i) for i in range(2)]
            await done(service, SaveForSampler(models[0], 1, digest(1), sampling_session_seq_id=1))
            database, write, left = service.parts.database, service.parts.database.write, failures

            async def failing(work: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError("the server closed the connection")
                return await write(work)

            database.write = failing  # type: ignore[method-assign]
            with pytest.raises(OSError, match="closed the connection"):
                await service.finish_session(session)
            # All that can be released is, and the rest the next time.
            await eventually(lambda: not training.models)
            await service.finish_session(session)
            assert sampling.open_snapshots == {}
            with pytest.raises(SessionOverError):
                await service.heartbeat(session)

    asyncio.run(main())


def test_a_session_without_heartbeats_times_out(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, FakeSampling(), session_timeout_s=2.0) as service:
            session, other = await service.create_session([]), await service.create_session([])
            model, kept = await new_model(service, session), await new_model(service, other)
            waiting = await service.submit(train(model, 2))

            async def beat() -> None:
                while True:
                    await service.heartbeat(other)
                    await asyncio.sleep(0.02)

            beating = asyncio.create_task(beat())
            assert "timed out after 2.0 s" in ((await outcome(service, waiting)).error or "")
            await eventually(lambda: set(training.models) == {kept})
            beating.cancel()
            with pytest.raises(SessionOverError):
                await service.heartbeat(session)

    asyncio.run(main())


class EndsInLoads(FakeTraining):
    """A backend that ends whenever it loads a snapshot."""

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> Any:
        self.models.clear()
        raise BackendLostError("a worker died")


def test_timed_out_model_whose_restoration_ends_the_backend_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), recovery_steps=1, recovery_fraction=1.0) as service:
            model = await new_model(service)
            await done(service, train(model, 1))
            await done(service, step(model, 2, learning_rate=0.01))
            await eventually(lambda: any(tmp_path.glob("checkpoints/*/live/*")))
        training = EndsInLoads()
        async with serving(tmp_path, training, session_timeout_s=0.2) as service:
            await eventually(lambda: not service.parts.training.order.models)
            await eventually(lambda: training.calls.count(("restart",)) == MAX_ATTEMPTS)
            await eventually(lambda: not service.parts.sessions.count())

    asyncio.run(main())


def test_a_session_that_ends_while_a_model_is_created_releases_it(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            session = await service.create_session([])
            training.gate.clear()
            config = {"rank": 4}
            created = await service.submit(CreateModel(session, 0, digest(0), base_model="base", lora_config=config))
            await asyncio.sleep(0.02)
            await service.finish_session(session)
            assert (await outcome(service, created)).state == "failed"
            training.gate.set()
            await eventually(lambda: ("delete", f"{session}:train:0") in training.calls)
            assert training.models == {}
            assert (await service.status())["models"] == []

    asyncio.run(main())


def test_creation_that_fails(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            session = await service.create_session([])

            def create(number: int, **fields: object) -> CreateModel:
                values = {"base_model": "base", "lora_config": {"rank": 4}} | fields
                return CreateModel(session, number, digest(number), **values)  # type: ignore[arg-type]

            assert "this server trains base, alias" in await refused(service, create(0, base_model="x"))
            assert "rank" in await refused(service, create(1, lora_config={"rank": 99}))
            assert "dimuon" in await refused(service, create(2, optimizer_config={"type": "dimuon"}))
            assert "user_metadata" in await refused(service, create(3, user_metadata=[1]))
            # The backend says how much memory is available.
            assert "1 MiB available" in await refused(service, create(4, lora_config={"rank": 13}))
            assert "could not be created" in await refused(service, train(f"{session}:train:4", 1))
            for model in ("unknown", f"{session}:train:0", "../x"):
                with pytest.raises(NotFoundError):
                    await service.submit(train(model, 1))
            # Idempotent, and a failure leaves nothing behind.
            first, second = await service.submit(create(5)), await service.submit(create(5))
            assert first == second
            assert (await outcome(service, first)).result["model_id"] == f"{session}:train:5"
            assert len([call for call in training.calls if call[0] == "create_model"]) == 2
            assert set(training.models) == {f"{session}:train:5"}

    asyncio.run(main())


def test_a_session_keeps_what_its_client_says(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            session = await service.create_session(
                ["a", "b"], {"k": [1]}, "0.38.0", "project", "x\x00\ud800" + "y" * 20000
            )
            answer = await service.session(session)
            assert answer["user_metadata"] == {"k": [1]}
            assert answer["display_name"].startswith("x?y")
            with pytest.raises(UserError, match="user_metadata"):
                await service.create_session([], {"x": float("nan")})
            await service.heartbeat(session)
            with pytest.raises(NotFoundError):
                await service.retrieve("unknown", 0.1)
            name = f"{session}:sample:0"
            with pytest.raises(NotFoundError):
                await service.submit(sample(name))

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields", [{"optimizer_config": {"type": ["adamw"]}}, {"lora_config": {"rank": 4, "alpha": 10**400}}], ids=str
)
def test_a_creation_that_cannot_be_read_fails_and_so_does_its_retry(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            session = await service.create_session([])
            request = CreateModel(session, 0, digest(0), **{"base_model": "base", "lora_config": {"rank": 4}, **fields})
            for _ in range(2):
                answer = await outcome(service, await service.submit(request))
                assert (answer.state, answer.category) == ("failed", "user")

    asyncio.run(main())
