"""Sampling sessions, their snapshots, and requests that run concurrently."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.tests.harness.limits import PATIENTLY
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
    tokens,
    train,
)
from areal.tinker.backends.errors import UserError
from areal.tinker.service.errors import BusyError, ConflictError, NotFoundError, SessionOverError
from areal.tinker.service.settings import ServiceLimits
from areal.tinker.service.tenants.caller_service import CallerService
from areal.tinker.service.verbs.weights import SaveForSampler


async def trained(service: CallerService, model: str, seq: int, **fields: Any) -> dict[str, Any]:
    """Change a model by one step, and save it for the sampler."""
    await done(service, train(model, seq))
    await done(service, step(model, seq + 1, learning_rate=0.5))
    return await done(service, SaveForSampler(model, seq + 2, digest(seq, fields), **fields))


def test_requests_run_concurrently_up_to_a_limit_and_wait_up_to_another(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling, running_samples=3, max_samples=5) as service:
            session = await service.create_session([])
            name = await service.create_sampling_session(session, 0, base_model="base")
            sampling.gate.clear()
            submitted = [await service.submit(sample(name, i, first=i)) for i in range(5)]
            await eventually(lambda: sampling.running == 3)
            with pytest.raises(BusyError, match="5 sampling requests"):
                await service.submit(sample(name, 5, first=5))
            assert (await service.retrieve(submitted[0].request_id, 0.01)).state == "pending"
            sampling.gate.set()
            for i, s in enumerate(submitted):
                assert (await outcome(service, s)).result.answers[0].tokens[0] == i
            assert sampling.most_running == 3
            # The places of the requests are free one turn of the loop after their results.
            await asyncio.sleep(0.01)
            await done(service, sample(name, 5, first=5))

    asyncio.run(main())


def test_ids_of_answers_and_retries(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling) as service:
            session = await service.create_session([])
            name = await service.create_sampling_session(session, 0, base_model="base")
            first = await service.submit(sample(name, 7, num_samples=3))
            assert len(set(first.sample_sequence_ids or ())) == 3
            assert await service.submit(sample(name, 7, num_samples=3)) == first
            assert len((await outcome(service, first)).result.answers) == 3
            assert await service.submit(sample(name, 7, num_samples=3)) == first
            with pytest.raises(ConflictError, match="seq_id 7"):
                await service.submit(sample(name, 7, first=2))
            # Without a number, equal requests are two requests.
            assert await service.submit(sample(name)) != await service.submit(sample(name))
            # A wrong request has ids, too, and fails alone.
            assert "could not be read" in await refused(service, sample(name, 9, sampling_params=3))
            for number, count in enumerate((0, -(2**62), 2**62), start=10):
                wrong = await service.submit(sample(name, number, num_samples=count))
                assert len(wrong.sample_sequence_ids or ()) == max(1, min(count, ServiceLimits().max_num_samples))
                assert "num_samples" in ((await outcome(service, wrong)).error or "")

    asyncio.run(main())


def test_failures_have_categories_and_stay_alone(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling) as service:
            session = await service.create_session([])
            name = await service.create_sampling_session(session, 0, base_model="base")
            assert "token ids" in await refused(service, sample(name, 1, prompt=tokens(99)))
            assert "generation broke" in await refused(service, sample(name, 2, first=62), "server")
            await done(service, sample(name, 3))
            with pytest.raises(NotFoundError):
                await service.submit(sample("unknown", 1))
            for number, arguments in enumerate(({}, {"base_model": "x"}, {"model_path": "tinker://x/weights/y"}), 1):
                with pytest.raises(UserError, match=r"base_model|path"):
                    await service.create_sampling_session(session, number, **arguments)
            with pytest.raises(NotFoundError):
                await service.create_sampling_session("unknown", 1, base_model="base")
        async with serving(tmp_path, FakeTraining(), None) as service:
            session = await service.create_session([])
            with pytest.raises(UserError, match="no sampler"):
                await service.create_sampling_session(session, 1, base_model="base")
            model = await new_model(service, session)
            assert "no sampler" in await refused(
                service, SaveForSampler(model, 1, digest(1), sampling_session_seq_id=1)
            )

    asyncio.run(main())


def test_sessions_keep_their_weights_after_an_overwrite_and_a_deletion(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            path = (await trained(service, model, 1, path="one"))["path"]
            old = [await service.create_sampling_session(session, i, model_path=path) for i in range(2)]
            # Sessions of the same weights have one copy.
            assert len(sampling.open_snapshots) == 1
            assert await service.create_sampling_session(session, 1, model_path=path) == old[1]
            with pytest.raises(ConflictError, match="sampling_session_seq_id 1"):
                await service.create_sampling_session(session, 1, base_model="base")
            await trained(service, model, 4, path="one", overwrite=True)
            new = await service.create_sampling_session(session, 2, model_path=path)
            await service.delete_checkpoint(model, "sampler_weights/one")
            for name, weight in ((old[0], 1.0), (new, 2.0), (old[1], 1.0)):
                assert (await done(service, sample(name))).answers[0].logprobs[0] == weight
            assert await service.sampler(new) == {"sampler_id": new, "base_model": "base", "model_path": path}

    asyncio.run(main())


def test_snapshots_of_every_step_do_not_fill_the_memory(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling, max_open_snapshots=2) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            names = [
                (await trained(service, model, 3 * i + 1, sampling_session_seq_id=i))["sampling_session_id"]
                for i in range(5)
            ]
            await eventually(lambda: len(sampling.open_snapshots) <= 2)
            # A closed snapshot is read again from its folder.
            weights = [(await done(service, sample(name))).answers[0].logprobs[0] for name in names]
            assert weights == [1.0, 2.0, 3.0, 4.0, 5.0]
            await eventually(lambda: len(sampling.open_snapshots) <= 2)
            folders = list(tmp_path.glob("checkpoints/*/ephemeral/*"))
            assert len(folders) == 5
            # The end of the session releases all.
            await service.finish_session(session, {"type": "success"})
            assert sampling.open_snapshots == {}
            assert not any(folder.exists() for folder in folders)
            with pytest.raises(SessionOverError):
                await service.submit(sample(names[0]))

    asyncio.run(main())


def test_snapshots_that_nobody_uses_are_deleted_in_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling, snapshot_idle_s=2.0) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            used, unused = [
                (await trained(service, model, 3 * i + 1, sampling_session_seq_id=i))["sampling_session_id"]
                for i in range(2)
            ]
            path = (await trained(service, model, 7, path="one"))["path"]
            named = await service.create_sampling_session(session, 2, model_path=path)
            end = asyncio.get_running_loop().time() + PATIENTLY
            while len(list(tmp_path.glob("checkpoints/*/ephemeral/*"))) == 2:
                assert asyncio.get_running_loop().time() < end
                await done(service, sample(used))
                await asyncio.sleep(0.02)
            with pytest.raises(SessionOverError, match="has ended"):
                await service.submit(sample(unused))
            await done(service, sample(used))
            # Checkpoints are the client's to delete.
            await done(service, sample(named))

    asyncio.run(main())


def test_cancel_and_the_end_of_a_session_stop_requests(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling) as service:
            session = await service.create_session([])
            name = await service.create_sampling_session(session, 0, base_model="base")
            sampling.gate.clear()
            submitted = [await service.submit(sample(name, i)) for i in range(3)]
            await eventually(lambda: sampling.running == 3)
            await service.cancel(submitted[0].request_id)
            with pytest.raises(NotFoundError):
                await service.cancel("unknown")
            assert "cancelled" in ((await outcome(service, submitted[0])).error or "")
            assert sampling.running == 2
            # One that was cancelled before its first step.
            at_once = await service.submit(sample(name, 9))
            await service.cancel(at_once.request_id)
            assert (await outcome(service, at_once)).category == "user"
            await service.finish_session(session)
            for s in submitted:
                answer = await outcome(service, s)
                assert (answer.state, answer.category) == ("failed", "user")
            assert sampling.running == 0

    asyncio.run(main())


def test_old_clients_name_weights_in_the_request(tmp_path: Path) -> None:
    async def main() -> None:
        sampling = FakeSampling()
        async with serving(tmp_path, FakeTraining(), sampling) as service:
            model = await new_model(service)
            path = (await trained(service, model, 1, path="one"))["path"]
            for fields, weight in (({"model_path": path}, 1.0), ({"base_model": "alias"}, 0.0)):
                assert (await done(service, sample(None, **fields))).answers[0].logprobs[0] == weight
            assert "give one of them" in await refused(service, sample(None))
            assert "no such checkpoint" in await refused(service, sample(None, model_path=path + "x"))

    asyncio.run(main())


def test_only_the_last_tokens_of_the_prompt_are_scored(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), FakeSampling()) as service:
            session = await service.create_session([])
            name = await service.create_sampling_session(session, 0, base_model="base")
            fields = {"prompt": tokens(1, 2, 3, 4), "prompt_logprobs": True, "topk_prompt_logprobs": 2}
            result = await done(service, sample(name, 1, **fields))
            assert np.isnan(result.prompt_logprobs).tolist() == [True, False, False, False]
            result = await done(service, sample(name, 2, prompt_logprobs_last_n=2, **fields))
            assert np.isnan(result.prompt_logprobs).tolist() == [True, True, False, False]
            assert np.isnan(result.prompt_top.logprobs[:, 0]).tolist() == [True, True, False, False]
            assert result.prompt_top.ids[:, 0].tolist() == [0, 0, 1, 1]

    asyncio.run(main())
