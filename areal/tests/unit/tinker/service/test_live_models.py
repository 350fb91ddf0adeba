"""Live models after a restart, a kill or a loss of the backend: clients that only retry go on, with the same bits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from areal.tests.unit.tinker.service.crashes import Deadly, killed
from areal.tests.unit.tinker.service.fakes import (
    FakeTraining,
    datum,
    digest,
    done,
    eventually,
    new_model,
    outcome,
    refused,
    serving,
    step,
    train,
)
from areal.tinker.backends.errors import BackendLostError, UserError
from areal.tinker.service.recovery.survivors import MAX_ATTEMPTS
from areal.tinker.service.tenants.caller_service import CallerService
from areal.tinker.service.verbs.forward_backward import Forward
from areal.tinker.service.verbs.models import CreateFromCheckpoint
from areal.tinker.service.verbs.weights import LoadWeights, SaveWeights

EACH_STEP: dict[str, Any] = {"recovery_steps": 1, "recovery_fraction": 1.0}


async def steps(service: CallerService, model: str, first: int, count: int) -> list[float]:
    """Train so many steps of two requests each, from the number ``first`` on. Returns the losses."""
    losses = []
    for seq in range(first, first + 2 * count, 2):
        passed = await done(service, train(model, seq, data=[datum(1 + seq % 5, weight=0.5 + seq)]))
        losses.append(passed.metrics["loss:sum"])
        await done(service, step(model, seq + 1, learning_rate=0.01))
    return losses


def snapshots(root: Path) -> list[Path]:
    return sorted(root.glob("checkpoints/*/live/*"))


def journal(root: Path) -> int:
    """Return how many requests the journal has."""
    engine = create_engine(f"sqlite:///{root}/tinker.db")
    with engine.begin() as connection:
        count = connection.execute(text("SELECT count(*) FROM journal")).scalar_one()
    engine.dispose()
    return int(count)


@pytest.mark.parametrize(
    "changes",
    [{}, {"recovery_steps": 2, "recovery_fraction": 1.0}, EACH_STEP],
    ids=["the journal only", "a snapshot of two steps", "a snapshot of each step"],
)
def test_killed_servers_change_no_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def main() -> None:
        expected = FakeTraining()
        async with serving(tmp_path / "whole", expected) as service:
            model = await new_model(service)
            losses = await steps(service, model, 1, 10)
            state = expected.models[model]
        root, found, seq = tmp_path / "killed", [], 1
        async with killed(root, FakeTraining(), **changes) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
        for count in (1, 2, 3):
            async with killed(root, FakeTraining(), **changes) as service:
                found += await steps(service, model, seq, count)
                seq += 2 * count
                # Killed between a pass and its step, which arrives at the next server.
                passed = await done(service, train(model, seq, data=[datum(1 + seq % 5, weight=0.5 + seq)]))
                found.append(passed.metrics["loss:sum"])
            async with killed(root, FakeTraining(), **changes) as service:
                await service.heartbeat(session)
                await done(service, step(model, seq + 1, learning_rate=0.01))
                seq += 2
        last = FakeTraining()
        async with serving(root, last, **changes) as service:
            assert [point["loss"] for point in (await service.status())["losses"][model]] == losses[:9]
            assert not (await service.training_run(model))["corrupted"]
            found += await steps(service, model, seq, 1)
            assert found == losses
            assert last.models[model] == state

    asyncio.run(main())


def test_unfinished_requests_run_after_a_kill_in_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with killed(tmp_path, training) as service:
            model = await new_model(service)
            await steps(service, model, 1, 2)
            training.gate.clear()
            requests = [
                train(model, 5, data=[datum(1, weight=2.0)]),
                step(model, 6, learning_rate=0.1),
                train(model, 7, data=[]),
                SaveWeights(model, 8, digest(8), path="saved"),
                Forward(model, 10, digest(10), data=[datum()]),
            ]
            submitted = [await service.submit(each) for each in requests]
        async with serving(tmp_path, after := FakeTraining()) as service:
            answers = [await outcome(service, each) for each in submitted[:4]]
            assert [each.state for each in answers] == ["done", "done", "failed", "done"]
            assert "data is empty" in (answers[2].error or "")
            # The last one waits for the request that is missing. The client sends it, and repeats another.
            assert (await outcome(service, submitted[4], 0.1)).state == "pending"
            await done(service, train(model, 9))
            assert (await outcome(service, submitted[4])).state == "done"
            assert (await service.submit(requests[3])).request_id == submitted[3].request_id
            ran = [call[0] for call in after.calls]
            assert ran == [
                "create_model",
                *["forward_backward", "optim_step"] * 3,
                "save",
                "forward_backward",
                "forward",
            ]

    asyncio.run(main())


def test_a_stopped_server_stores_its_models_and_the_next_one_runs_nothing_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            session = await service.create_session([])
            model, other = [await new_model(service, session, number) for number in range(2)]
            await steps(service, model, 1, 3)
            assert not snapshots(tmp_path)
        assert len(snapshots(tmp_path)) == 1
        # The model without steps has its creation only.
        assert journal(tmp_path) == 1
        async with serving(tmp_path, after := FakeTraining()) as service:
            await steps(service, model, 7, 1)
            assert [call[0] for call in after.calls] == ["load", "forward_backward", "optim_step"]
            assert after.calls[0] == ("load", model, True)
            await done(service, train(other, 1))
            await service.finish_session(session)
            assert not snapshots(tmp_path)
            assert journal(tmp_path) == 0

    asyncio.run(main())


def test_snapshots_replace_each_other_and_cut_the_journal(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, training := FakeTraining(), **EACH_STEP) as service:
            model = await new_model(service)
            await done(service, train(model, 1))
            await done(service, Forward(model, 2, digest(2), data=[datum()]))
            assert journal(tmp_path) == 2
            await done(service, step(model, 3))
            await eventually(lambda: journal(tmp_path) == 0)
            await steps(service, model, 4, 3)
            await eventually(lambda: journal(tmp_path) == 0 and len(snapshots(tmp_path)) == 1)
            saves = [call for call in training.calls if call[0] == "save"]
            assert len(saves) == 4
            # Without room nothing is stored, and the earlier snapshot stays.
            training.save = lambda *call: (_ for _ in ()).throw(OSError(28, "no space"))  # type: ignore[method-assign,assignment]
            before = snapshots(tmp_path)
            await steps(service, model, 10, 1)
            await done(service, train(model, 12))
            assert snapshots(tmp_path) == before
            assert journal(tmp_path) == 3

    asyncio.run(main())


def test_a_failed_step_fails_again_and_a_loaded_model_needs_no_checkpoint(tmp_path: Path) -> None:
    class Infinite(FakeTraining):
        def optim_step(self, model_id: str, params: Any) -> dict[str, float]:
            if params.learning_rate == 7.0:
                self.models[model_id]["grad"] = 0.0
                raise UserError("the gradient is not finite")
            return super().optim_step(model_id, params)

    async def main() -> None:
        async with killed(tmp_path, Infinite()) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            await steps(service, model, 1, 1)
            path = (await done(service, SaveWeights(model, 3, digest(3), path="one")))["path"]
            await done(service, train(model, 4))
            await refused(service, step(model, 5, learning_rate=7.0))
            copy = CreateFromCheckpoint(session, 5, digest(5), path=path, optimizer=True)
            copy_id = (await done(service, copy))["model_id"]
            await done(service, LoadWeights(model, 6, digest(6), path=path, optimizer=True))
            await done(service, train(model, 7))
            for each in (model, copy_id):
                await eventually(lambda each=each: any(each in str(folder) for folder in snapshots(tmp_path)))
            await service.delete_checkpoint(model, "weights/one")
        async with serving(tmp_path, after := Infinite()) as service:
            await done(service, step(copy_id, 1))
            await done(service, step(model, 8, learning_rate=1.0))
            assert after.models[copy_id]["steps"] == 2
            assert after.models[model]["steps"] == 2

    asyncio.run(main())


def test_a_failed_step_runs_again(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with killed(tmp_path, training) as service:
            model = await new_model(service)
            await done(service, train(model, 1))
            training.fail_next = UserError("the gradient is not finite")
            await refused(service, step(model, 2))
        async with serving(tmp_path, after := FakeTraining()) as service:
            # The fake has no reason to fail again: the state would be another one.
            error = await refused(service, train(model, 3), "server")
            assert "could not be restored" in error
            assert "seq_id 2 (optim_step)" in error
            assert model in error
            assert ("optim_step", model, 1e-4) in after.calls
            assert (await service.training_run(model))["corrupted"]

    asyncio.run(main())


def test_ordinary_stops_lose_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of a request which runs at the end of each server, nor that of one which waits."""
    monkeypatch.setattr("areal.tinker.service.training._STOP_S", 0.0)

    async def main() -> None:
        async with killed(tmp_path, FakeTraining()) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, number) for number in range(2)]
            waiting = await service.submit(train(models[1], 2))
            slow = await service.submit(train(models[0], 1, first=9))
        for _ in range(MAX_ATTEMPTS):
            training = Deadly()
            async with serving(tmp_path, training) as service:
                await eventually(lambda training=training: training.together > 0)
                asyncio.get_running_loop().call_later(0.1, training.gate.set)
                assert (await service.retrieve(waiting.request_id, 0)).state == "pending"
        async with serving(tmp_path, FakeTraining()) as service:
            await done(service, train(models[1], 1))
            for submitted in (slow, waiting):
                assert (await outcome(service, submitted)).state == "done"

    asyncio.run(main())


def test_models_go_on_after_the_loss_of_the_backend(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, recovery_steps=2, recovery_fraction=1.0) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, number) for number in range(3)]
            await steps(service, models[0], 1, 3)
            await done(service, train(models[1], 1))
            training.gate.clear()
            submitted = [await service.submit(train(model, seq)) for model, seq in zip(models, (7, 2, 2), strict=True)]
            training.lost = True
            training.gate.set()
            for each in submitted[:2]:
                assert (await outcome(service, each)).state == "done"
            assert training.models[models[0]]["steps"] == 3
            assert training.models[models[1]]["grad"] == 4.0
            await done(service, train(models[2], 1))
            assert (await outcome(service, submitted[2])).state == "done"
            assert ("load", models[0], True) in training.calls
            assert service.parts.trouble() is None

    asyncio.run(main())


def test_a_request_that_loses_the_backend_again_and_again_loses_its_model_only(tmp_path: Path) -> None:
    class Fragile(FakeTraining):
        def forward_backward(self, batches: Any) -> list[Any]:
            if any(batch.data[0].input_ids[0] == 9 for batch in batches):
                self.models.clear()
                return [BackendLostError("a worker died")] * len(batches)
            return super().forward_backward(batches)

    async def main() -> None:
        training = Fragile()
        async with serving(tmp_path, training) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, number) for number in range(3)]
            training.gate.clear()
            first = await service.submit(step(models[2], 1))
            submitted = [
                await service.submit(train(model, 1, first)) for model, first in zip(models, (1, 9), strict=False)
            ]
            training.gate.set()
            assert (await outcome(service, first)).state == "done"
            assert (await outcome(service, submitted[0])).state == "done"
            answer = await outcome(service, submitted[1])
            assert (answer.state, answer.category) == ("failed", "server")
            assert "a worker died" in (answer.error or "")
            await eventually(lambda: training.calls.count(("restart",)) == MAX_ATTEMPTS)
            await done(service, step(models[0], 2))
            assert "was lost" in await refused(service, step(models[1], 2), "server")

    asyncio.run(main())


def test_a_model_of_a_backend_that_does_not_start_again_says_so(tmp_path: Path) -> None:
    class Broken(FakeTraining):
        def restart(self) -> None:
            super().restart()
            raise OSError("no device")

    async def main() -> None:
        training = Broken()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            training.lost = True
            error = await refused(service, train(model, 1), "server")
            assert "could not be restarted (no device): try again later, or restart the server" in error
            assert model in service.parts.training.order.models

    asyncio.run(main())


def test_models_outlive_a_backend_that_is_away_for_a_while(tmp_path: Path) -> None:
    class Away(FakeTraining):
        attempts = 0

        def restart(self) -> None:
            super().restart()
            self.attempts += 1
            if self.attempts <= 2:
                raise OSError("no device")

    async def main() -> None:
        training = Away()
        async with serving(tmp_path, training, **EACH_STEP) as service:
            model = await new_model(service)
            await steps(service, model, 1, 2)
            weight, training.lost = training.models[model]["weight"], True
            assert "no device" in await refused(service, train(model, 5), "server")
            await done(service, train(model, 6))  # the ranks are back
            assert training.models[model]["weight"] == weight

    asyncio.run(main())


def test_a_stop_while_a_session_times_out_keeps_its_models(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, session_timeout_s=1.0, **EACH_STEP) as service:
            model = await new_model(service)
            await steps(service, model, 1, 2)
            await eventually(lambda: bool(snapshots(tmp_path)))
            training.gate.clear()  # the checkpoint of the timeout takes a while
            await eventually(lambda: service.parts.sessions.count() == 0)
            await asyncio.sleep(0.2)
            asyncio.get_running_loop().call_later(0.5, training.gate.set)
        async with serving(tmp_path, FakeTraining()) as service:
            assert model in service.parts.training.order.models or (await service.checkpoints(model))["checkpoints"]

    asyncio.run(main())


def test_without_recovery_models_are_lost_and_nothing_is_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), recovery=False, **EACH_STEP) as service:
            model = await new_model(service)
            await steps(service, model, 1, 2)
            assert not snapshots(tmp_path)
        assert journal(tmp_path) == 0
        async with serving(tmp_path, FakeTraining()) as service:
            assert "was lost" in await refused(service, train(model, 5), "server")

    asyncio.run(main())


def test_a_model_whose_client_is_away_is_saved_before_it_is_released(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), session_timeout_s=2.0) as service:
            model = await new_model(service)
            await steps(service, model, 1, 2)
            await asyncio.sleep(0.1)
        # The client does not come back to the next server, either.
        async with serving(tmp_path, FakeTraining(), session_timeout_s=0.3) as service:
            await eventually(lambda: not service.parts.training.order.models)
            (saved,) = (await service.checkpoints(model))["checkpoints"]
            assert saved["tinker_path"] == f"tinker://{model}/weights/timed-out"
            assert saved["expires_at"]
            again = await service.create_session([])
            request = CreateFromCheckpoint(again, 0, digest(0), path=saved["tinker_path"], optimizer=True)
            await done(service, request)
            assert not [folder for folder in snapshots(tmp_path) if model in str(folder)]

    asyncio.run(main())
