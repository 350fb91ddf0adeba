"""Crashes, restarts, the lease, and the loss of the backend: nothing that was acknowledged is lost silently."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from areal.tests.harness.limits import PROMPTLY, promptly
from areal.tests.unit.tinker.service.crashes import Deadly, check_after_crash, kill, killed, start
from areal.tests.unit.tinker.service.fakes import (
    LOCAL,
    FakeSampling,
    FakeTraining,
    datum,
    digest,
    done,
    eventually,
    new_model,
    outcome,
    refused,
    sample,
    serving,
    settings,
    step,
    train,
)
from areal.tinker.backends.errors import BackendLostError, ServerError
from areal.tinker.backends.prepared import PassResult
from areal.tinker.service.errors import ConflictError, LeaseLostError, NotFoundError
from areal.tinker.service.recovery.survivors import MAX_ATTEMPTS
from areal.tinker.service.service import Service
from areal.tinker.service.store.database import _pid_space
from areal.tinker.service.verbs.models import CreateFromCheckpoint, CreateModel
from areal.tinker.service.verbs.weights import SaveForSampler, SaveWeights


@pytest.mark.parametrize("lines", [12, pytest.param(None)])
def test_kill_at_any_point_loses_nothing_that_was_acknowledged(tmp_path: Path, lines: int | None) -> None:
    """After 12 lines all requests are sent: three are queued and one samples."""
    for number in [lines] if lines else [2, *random.Random(0).sample(range(3, 12), 5)]:
        root = tmp_path / str(number)
        asyncio.run(check_after_crash(root, kill(start(root), number)))


def test_a_restart_keeps_sessions_results_and_snapshots(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), FakeSampling()) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            passed = await service.submit(train(model, 1))
            assert (await outcome(service, passed)).state == "done"
            await done(service, step(model, 2, learning_rate=0.5))
            snapshot = await done(service, SaveForSampler(model, 3, digest(3), sampling_session_seq_id=0))
            path = (await done(service, SaveForSampler(model, 4, digest(4), path="one")))["path"]
            named = await service.create_sampling_session(session, 1, model_path=path)
            sampled = await service.submit(sample(named, 0))
            assert (await outcome(service, sampled)).state == "done"
            losses = (await service.status())["losses"][model]
        async with serving(tmp_path, FakeTraining(), sampling := FakeSampling()) as service:
            # The client goes on with its session: heartbeats, results, sampling.
            await service.heartbeat(session)
            answer = await outcome(service, passed)
            assert isinstance(answer.result, PassResult)
            assert answer.result.logprobs[0].tolist() == [-3 / 64, -4 / 64, -5 / 64]
            assert answer.result_bytes > 0
            assert (await outcome(service, sampled)).result.answers[0].tokens.tolist() == [1, 1]
            for name in (snapshot["sampling_session_id"], named):
                assert (await done(service, sample(name, 5))).answers[0].logprobs[0] == 1.0
            assert len(sampling.open_snapshots) == 2
            assert (await service.status())["losses"][model] == losses
            # A retry of a finished request is answered; a new request is executed.
            assert (await service.submit(train(model, 1))).request_id == passed.request_id
            with pytest.raises(ConflictError):
                await service.submit(train(model, 1, first=9))
            await done(service, train(model, 5))
            folder = next(tmp_path.glob("checkpoints/*/ephemeral/*"))
            await service.finish_session(session)
            assert not folder.exists()

    asyncio.run(main())


def test_results_are_pruned_after_delivery_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), result_keep_s=0.4) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            read, unread = [await service.submit(train(model, seq)) for seq in (1, 2)]
            assert (await outcome(service, read)).state == "done"

            async def pruned(request_id: str) -> bool:
                try:
                    await service.retrieve(request_id, 0)
                except NotFoundError:
                    return True
                return False

            await done(service, step(model, 3))
            await asyncio.sleep(1.0)
            assert await pruned(read.request_id)
            assert (await outcome(service, unread)).state == "done"
            # Its number still tells a retry from a new request.
            assert (await service.submit(train(model, 1))).request_id == read.request_id
            never_read = await service.submit(train(model, 4))
            await service.finish_session(session)
            end = time.monotonic() + PROMPTLY
            while not await pruned(never_read.request_id):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_request_that_ends_every_server_loses_its_model_only(tmp_path: Path) -> None:
    async def main() -> None:
        training = Deadly()
        async with killed(tmp_path, training) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, number) for number in range(3)]
            # One of the others shares the first call, and one waits for its turn.
            training.gate.clear()
            first = await service.submit(step(models[0], 1))
            shared, poison = [await service.submit(train(models[i], 2 - i, first=1 + 8 * i)) for i in range(2)]
            training.gate.set()
            assert (await outcome(service, first)).state == "done"
            await eventually(lambda: training.together == 2)
            waiting = await service.submit(step(models[2], 1))
        for _ in range(MAX_ATTEMPTS - 1):
            training = Deadly()
            async with killed(tmp_path, training) as service:
                await eventually(lambda training=training: training.together > 0)
                assert training.together == 1
                # The next server counts neither the request that waits nor the restoration of its model.
                head = service.parts.training.order.models[models[2]].head()
                assert head is not None
                assert head.attempts == 0
        async with serving(tmp_path, FakeTraining()) as service:
            answer = await outcome(service, poison)
            assert (answer.state, answer.category) == ("failed", "server")
            assert "its request with seq_id 1 (forward_backward) had begun" in (answer.error or "")
            for submitted in (shared, waiting):
                assert (await outcome(service, submitted)).state == "done"

    asyncio.run(main())


def test_a_restoration_that_ends_every_server_loses_its_model(tmp_path: Path) -> None:
    class Restoring(FakeTraining):
        begun = False

        def create_model(self, *arguments: Any) -> None:
            self.begun = True
            super().create_model(*arguments)

    async def main() -> None:
        async with killed(tmp_path, training := FakeTraining()) as service:
            model = await new_model(service)
            training.gate.clear()
            submitted = await service.submit(step(model, 1))
        # The first server may have ended before the request began.
        for _ in range(MAX_ATTEMPTS):
            training = Restoring()
            training.gate.clear()
            async with killed(tmp_path, training) as service:
                live = service.parts.training.order.models
                await eventually(lambda training=training, live=live: training.begun or not live)
        async with serving(tmp_path, FakeTraining()) as service:
            answer = await outcome(service, submitted)
            assert (answer.state, answer.category) == ("failed", "server")

    asyncio.run(main())


# ---------------------------------------------------------------------- lease


def test_a_second_server_refuses_to_start_and_names_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        # On a busy machine the first server may renew its lease many seconds late.
        async with serving(tmp_path, FakeTraining(), lease_s=60.0) as service:
            model = await new_model(service)
            second = Service(FakeTraining(), None, settings(tmp_path, lease_s=60.0))
            with pytest.raises(RuntimeError, match=f"process {os.getpid()} on "):
                await second.start()
            # The first goes on, undisturbed.
            await done(service, train(model, 1))
            assert service.parts.trouble() is None
        # A server that stops gives up its lease.
        for _ in range(2):
            with promptly():
                async with serving(tmp_path, FakeTraining(), lease_s=60.0):
                    pass

    asyncio.run(main())


def test_the_lease_of_a_dead_server_is_taken_at_once_or_when_it_expires(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()):
            pass
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        engine = create_engine(f"sqlite:///{tmp_path}/tinker.db")
        row = {"owner": "other", "host": "h", "pid": dead.pid, "space": _pid_space()}
        for space, lease_s in ((row["space"], 3600.0), ("elsewhere", 1.0)):
            expires = time.time() + lease_s
            with engine.begin() as connection:
                statement = "INSERT INTO lease VALUES (1, :owner, :host, :pid, :space, :expires)"
                connection.execute(text(statement), {**row, "space": space, "expires": expires})
            with promptly():
                async with serving(tmp_path, FakeTraining(), lease_s=60.0) as service:
                    assert service.parts.trouble() is None
                    assert space != "elsewhere" or time.time() >= expires
        engine.dispose()

    asyncio.run(main())


def test_a_server_that_lost_its_lease_stops_writing_and_fails(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        server = Service(training, None, settings(tmp_path, lease_s=4.0))
        await server.start()
        service = server.for_caller(LOCAL)
        model = await new_model(service)
        training.gate.clear()
        running, waiting = await service.submit(train(model, 1)), await service.submit(train(model, 3))
        held = asyncio.create_task(service.retrieve(waiting.request_id, 30))
        # Another server took the database, as after a long pause of this process.
        engine = create_engine(f"sqlite:///{tmp_path}/tinker.db")
        with engine.begin() as connection:
            connection.execute(text("UPDATE lease SET owner = 'other', host = 'elsewhere', pid = 7"))
            before = connection.execute(text("SELECT * FROM futures ORDER BY request_id")).all()
        training.gate.set()
        error = await asyncio.wait_for(server.failed(), 20)
        assert isinstance(error, LeaseLostError)
        assert "process 7 on elsewhere" in str(error)
        assert (await held).category == "server"
        for call in (
            service.submit(train(model, 2)),
            service.create_session([]),
            service.retrieve(running.request_id, 0),
        ):
            with pytest.raises(ServerError, match="lost its lease"):
                await call
        assert server.trouble()
        await server.stop()
        # Nothing was written, not even at the end.
        with engine.begin() as connection:
            assert connection.execute(text("SELECT owner FROM lease")).scalar() == "other"
            assert connection.execute(text("SELECT * FROM futures ORDER BY request_id")).all() == before
        engine.dispose()

    asyncio.run(main())


# ---------------------------------------------------------------------- backend


def test_without_recovery_the_loss_of_the_backend_fails_its_models_and_the_server_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, recovery=False) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, i) for i in range(3)]
            path = (await done(service, SaveWeights(models[0], 1, digest(1), path="one")))["path"]
            training.gate.clear()
            submitted = [await service.submit(train(model, seq)) for model, seq in zip(models, (2, 1, 5), strict=True)]
            training.lost = True
            training.gate.set()
            errors = []
            for s in submitted:
                answer = await outcome(service, s)
                assert (answer.state, answer.category) == ("failed", "server")
                errors.append(answer.error or "")
            assert path in errors[0]
            assert "has no checkpoint" in errors[1]
            await eventually(lambda: service.parts.trouble() is None)
            assert ("restart",) in training.calls
            assert "a worker died" in errors[2]
            later = await refused(service, train(models[0], 3), "server")
            assert path in later
            assert "training processes were restarted" in later
            # The client resumes from its checkpoint.
            again = (await done(service, CreateFromCheckpoint(session, 7, digest(7), path=path, optimizer=True)))[
                "model_id"
            ]
            await done(service, train(again, 1))

    asyncio.run(main())


def test_a_request_that_arrives_during_a_loss_fails_as_the_others_do(tmp_path: Path) -> None:
    async def main() -> None:
        training, checked = FakeTraining(), threading.Event()
        async with serving(tmp_path, training, recovery=False) as service:
            model = await new_model(service)
            path = (await done(service, SaveWeights(model, 1, digest(1), path="one")))["path"]
            # The second request is large: it is being validated when the first one loses the backend.
            service.parts.intake._thread.submit(checked.wait, 20)
            arriving = asyncio.ensure_future(service.submit(train(model, 3, data=[datum()] * 64)))
            await asyncio.sleep(0.05)
            training.lost = True
            assert "a worker died" in await refused(service, train(model, 2), "server")
            checked.set()
            answer = await outcome(service, await arriving)
            assert (answer.state, answer.category) == ("failed", "server")
            assert path in (answer.error or "")

    asyncio.run(main())


def test_a_backend_that_does_not_start_again_is_tried_by_the_next_creation(tmp_path: Path) -> None:
    class Stubborn(FakeTraining):
        broken = 2

        def restart(self) -> None:
            super().restart()
            self.broken -= 1
            if self.broken >= 0:
                raise OSError("no device")

    async def main() -> None:
        training = Stubborn()
        async with serving(tmp_path, training, recovery=False) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            # An unexpected error of a backend that is not healthy is its loss.
            training.fail_next, training.healthy = KeyError("broken pipe"), lambda: False  # type: ignore[method-assign]
            assert "broken pipe" in await refused(service, step(model, 1), "server")
            await eventually(lambda: ("restart",) in training.calls)
            del training.healthy  # type: ignore[attr-defined]
            assert service.parts.trouble()

            def create(number: int) -> CreateModel:
                return CreateModel(session, number, digest(number), base_model="base", lora_config={"rank": 4})

            assert "could not be restarted (no device)" in await refused(service, create(1), "server")
            assert (await done(service, create(2)))["model_id"] == f"{session}:train:2"
            assert service.parts.trouble() is None

    asyncio.run(main())


def test_a_loss_that_a_batch_reports_per_request_is_a_loss(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        training.forward_backward = lambda batches: [BackendLostError("gone")] * len(batches)  # type: ignore[method-assign]
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            assert "gone" in await refused(service, train(model, 1), "server")
            assert (await service.training_run(model))["corrupted"]

    asyncio.run(main())
