"""Order of requests within a model, idempotence, batching and fairness between models."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal.tests.unit.tinker.service.fakes import (
    FakeSampling,
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
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.service.errors import BusyError, ConflictError
from areal.tinker.service.order import Entry, LiveModel, Order
from areal.tinker.service.tenants.caller import Quotas
from areal.tinker.service.verbs.models import UnloadModel
from areal.tinker.service.verbs.weights import SaveForSampler


def marks(training: FakeTraining) -> list[int]:
    """First tokens of the executed passes, which name the requests."""
    return [mark for call in training.calls if call[0] == "forward_backward" for mark in call[2]]


arrivals = st.lists(
    st.tuples(st.permutations(range(1, 8)), st.lists(st.integers(1, 7), max_size=3)), min_size=6, max_size=6
)


@given(arrivals)
@hypothesis_settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_arrival_order_executes_each_request_once_in_its_order(arrivals: list[tuple[list[int], list[int]]]) -> None:
    async def main(root: Path) -> None:
        training = FakeTraining()
        async with serving(root, training) as service:
            session = await service.create_session([])
            for number, (order, again) in enumerate(arrivals):
                model = await new_model(service, session, number)
                # The first chunk is posted last by clients; retries arrive at any time.
                first = {seq: await service.submit(train(model, seq, first=seq)) for seq in order}
                second = [(seq, await service.submit(train(model, seq, first=seq))) for seq in again]
                for seq, submitted in [*first.items(), *second]:
                    assert (await outcome(service, submitted)).state == "done"
                    assert submitted.request_id == first[seq].request_id
                assert marks(training) == sorted(order)
                training.calls.clear()

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(main(Path(root)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), unique=True, max_size=16), st.integers(1, 4))
def test_groups_have_one_request_per_model_and_keep_each_order(arrivals: list[tuple[int, int]], most: int) -> None:
    order, ran = Order(), {}
    models = [LiveModel(str(i), "s", "local", "base", "adamw", next_seq=1) for i in range(4)]
    order.models.update((model.id, model) for model in models)
    for i, seq in arrivals:
        models[i].put(Entry("", train("", seq) if seq % 2 else step("", seq), seq=seq))
    while group := order.next_group(most):
        assert len({model.id for model, _ in group}) == len(group) <= most
        assert len({entry.kind for _, entry in group}) == 1
        assert len(group) == 1 or group[0][1].kind == "forward_backward"
        for model, entry in group:
            ran.setdefault(model.id, []).append(entry.seq)
            model.release()
    # Each model ran up to its first gap, in order.
    for i, model in enumerate(models):
        arrived = {seq for j, seq in arrivals if i == j}
        complete = [seq for seq in range(1, 8) if set(range(1, seq + 1)) <= arrived]
        assert ran.get(model.id, []) == complete


def test_models_take_turns() -> None:
    order = Order()
    for name in "ab":
        order.models[name] = LiveModel(name, "s", "local", "base", "adamw", next_seq=1)
    for seq in range(1, 4):
        order.models["a"].put(Entry("", step("a", seq), seq=seq))
    order.models["b"].put(Entry("", step("b", 1), seq=1))
    turns = []
    while group := order.next_group(8):
        turns.append(group[0][0].id)
        group[0][0].release()
    assert turns == ["a", "b", "a", "a"]


def test_old_clients_send_no_numbers_and_are_served_in_order_of_arrival(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            submitted = [await service.submit(train(model, None, first=i)) for i in (5, 5, 3, 9)]
            # Equal requests without numbers are not retries.
            assert len({s.request_id for s in submitted}) == 4
            for s in submitted:
                assert (await outcome(service, s)).state == "done"
        assert marks(training) == [5, 5, 3, 9]

    asyncio.run(main())


def test_a_number_with_another_content_is_refused_for_good(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            await done(service, train(model, 1, first=1))
            for _ in range(2):
                with pytest.raises(ConflictError, match=r"seq_id 1 .* earlier forward_backward"):
                    await service.submit(train(model, 1, first=2))
            with pytest.raises(UserError, match="seq_id is 0"):
                await service.submit(train(model, 0))
            await done(service, train(model, 2, first=3))
        assert marks(training) == [1, 3]

    asyncio.run(main())


def test_concurrent_retries_are_one_request(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            submitted = await asyncio.gather(*(service.submit(train(model, 1)) for _ in range(5)))
            assert len({s.request_id for s in submitted}) == 1
            assert (await outcome(service, submitted[0])).state == "done"
            assert (await outcome(service, submitted[0])).state == "done"
        assert marks(training) == [1]

    asyncio.run(main())


def test_wrong_requests_fail_alone_and_use_up_their_number(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            # Refused before compute, while earlier numbers are still missing.
            assert "data is empty" in await refused(service, train(model, 2, data=[]))
            assert "'stable_reinforce'" in await refused(service, train(model, 3, loss_fn="stable_reinforce"))
            good = await service.submit(train(model, 4, first=4))
            assert (await service.retrieve(good.request_id, 0.02)).state == "pending"
            await done(service, train(model, 1, first=1))
            assert (await outcome(service, good)).state == "done"
            # Refused by the backend.
            assert "63" in await refused(service, train(model, 5, first=63))
            await done(service, step(model, 6))
        assert marks(training) == [1, 4, 63]

    asyncio.run(main())


@pytest.mark.parametrize("batches", [True, False])
def test_ready_requests_of_several_models_are_one_call_and_fail_alone(tmp_path: Path, batches: bool) -> None:
    async def main() -> list[int]:
        training = FakeTraining(batches)
        async with serving(tmp_path, training) as service:
            session = await service.create_session([])
            models = [await new_model(service, session, i) for i in range(4)]
            training.gate.clear()
            held = await service.submit(step(models[0], 1))
            await asyncio.sleep(0.05)
            # The first request of the last model is wrong.
            submitted = [await service.submit(train(model, 1, first=60 + i)) for i, model in enumerate(models) if i]
            training.gate.set()
            states = [(await outcome(service, s)).state for s in (held, *submitted)]
            assert states == ["done", "done", "done", "failed"]
        return [len(call[1]) for call in training.calls if call[0] == "forward_backward"]

    assert asyncio.run(main()) == ([3] if batches else [1, 1, 1])


def test_models_train_while_the_sampler_reads_anothers_snapshot(tmp_path: Path) -> None:
    async def main() -> None:
        training, sampling = FakeTraining(), FakeSampling()
        async with serving(tmp_path, training, sampling) as service:
            session = await service.create_session([])
            first, second = [await new_model(service, session, i) for i in range(2)]
            sampling.reading.clear()
            saved = await service.submit(SaveForSampler(first, 1, digest(1), sampling_session_seq_id=0))
            later = await service.submit(step(first, 2))
            await done(service, train(second, 1))
            # The model's own next request waits: it must not overtake the save.
            assert (await service.retrieve(later.request_id, 0.02)).state == "pending"
            sampling.reading.set()
            for submitted in (saved, later):
                assert (await outcome(service, submitted)).state == "done"

    asyncio.run(main())


def test_a_save_ends_no_turn_of_another_model(tmp_path: Path) -> None:
    async def main() -> None:
        training, sampling = FakeTraining(), FakeSampling()
        async with serving(tmp_path, training, sampling) as service:
            session = await service.create_session([])
            first, second, *others = [await new_model(service, session, i) for i in range(4)]
            sampling.reading.clear()
            saved = await service.submit(SaveForSampler(first, 1, digest(1), sampling_session_seq_id=0))
            await eventually(lambda: any(call[0] == "save_for_sampler" for call in training.calls))
            # The turn of the second model begins before the save ends.
            training.gate.clear()
            submitted = [await service.submit(train(second, 1))]
            await eventually(lambda: service.parts.training.order.models[second].busy)
            sampling.reading.set()
            assert (await outcome(service, saved)).state == "done"
            for model in others:
                submitted.append(await service.submit(train(model, 1)))
                assert (await service.retrieve(submitted[-1].request_id, 0.05)).state == "pending"
            training.gate.set()
            for each in submitted:
                assert (await outcome(service, each)).state == "done"
        groups = [call[1] for call in training.calls if call[0] == "forward_backward"]
        assert groups == [(second,), tuple(others)]

    asyncio.run(main())


def test_a_cancelled_client_does_not_lose_the_request(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            posting = asyncio.create_task(service.submit(train(model, 1)))
            await asyncio.sleep(0)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            await done(service, train(model, 2, first=2))
            # The retry finds the request.
            await done(service, train(model, 1))
        assert marks(training) == [1, 2]

    asyncio.run(main())


def test_an_unexpected_error_fails_the_request_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            errors = [(UserError("own"), "user"), (ServerError("ours"), "server"), (KeyError("defect"), "server")]
            for seq, (error, category) in enumerate(errors, 1):
                training.fail_next = error
                assert str(error) in await refused(service, step(model, seq), category)
            training.fail_next = KeyError("defect")
            assert "defect" in await refused(service, train(model, 4), "server")
            await done(service, step(model, 5))

    asyncio.run(main())


def test_a_full_queue_refuses_all_but_the_request_for_which_it_waits(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, max_queued_per_model=3) as service:
            model = await new_model(service)
            waiting = [await service.submit(train(model, seq, first=seq)) for seq in (2, 3, 4)]
            with pytest.raises(BusyError, match="3 requests"):
                await service.submit(train(model, 5, first=5))
            await done(service, train(model, 1, first=1))
            for s in waiting:
                assert (await outcome(service, s)).state == "done"
            await done(service, train(model, 5, first=5))
        assert marks(training) == [1, 2, 3, 4, 5]

    asyncio.run(main())


def test_chunks_of_more_tokens_than_the_quota_arrive_before_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, quotas={"local": Quotas(max_queued_tokens=8)}) as service:
            session = await service.create_session([])
            model, other = [await new_model(service, session, i) for i in range(2)]
            training.gate.clear()
            submitted = [await service.submit(step(model, 1))]
            await eventually(lambda: service.parts.training.order.models[model].busy)
            submitted += [await service.submit(train(model, seq, first=seq)) for seq in (3, 4)]
            # The model does not wait for a missing request yet.
            with pytest.raises(BusyError, match="with 6 tokens wait or run, and the quota is 8"):
                await service.submit(train(model, 5, first=5))
            training.gate.set()
            assert (await outcome(service, submitted[0])).state == "done"
            await eventually(service.parts.training.order.models[model].has_gap)
            submitted += [await service.submit(train(model, seq, first=seq)) for seq in (5, 6, 2)]
            for each in submitted:
                assert (await outcome(service, each)).state == "done"
            await done(service, train(other, 1, first=7))
        assert marks(training) == [2, 3, 4, 5, 6, 7]

    asyncio.run(main())


def test_a_gap_waits_and_then_fails_what_waits_without_executing_it(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, gap_timeout_s=0.1) as service:
            model = await new_model(service)
            late = await service.submit(train(model, 2, first=2))
            answer = await outcome(service, late)
            assert (answer.state, answer.category) == ("failed", "user")
            assert "seq_id 1" in (answer.error or "")
            # The place of a failed request is free, and the order is kept for the rest.
            assert (await service.status())["queue"]["training"] == 0
            await done(service, train(model, 1, first=1))
            await done(service, train(model, 3, first=3))
        assert marks(training) == [1, 3]

    asyncio.run(main())


def test_waiting_costs_no_cpu(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, lease_s=20.0) as service:
            model = await new_model(service)
            submitted = await service.submit(train(model, 2, data=[datum(1)]))
            clients = [asyncio.create_task(service.retrieve(submitted.request_id, 1.0)) for _ in range(10)]
            await asyncio.sleep(0.05)
            before = time.process_time()
            assert {answer.state for answer in await asyncio.gather(*clients)} == {"pending"}
            assert time.process_time() - before < 0.1

    asyncio.run(main())


def test_unload_releases_the_adapter_and_later_requests_fail(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            await done(service, UnloadModel(model, None, digest("unload")))
            assert "was released" in await refused(service, train(model, 2))
            assert "was released" in await refused(service, train(model, 3))
        assert training.models == {}

    asyncio.run(main())
