"""Every verb of the service, on backends in memory and a real database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from areal.tests.unit.tinker.service.fakes import (
    FakeSampling,
    FakeTraining,
    digest,
    done,
    new_model,
    sample,
    serving,
    step,
    train,
)
from areal.tinker.backends.prepared import PassResult, SamplingResult
from areal.tinker.service.checkpoints import spec_of
from areal.tinker.service.verbs.models import CreateFromCheckpoint, UnloadModel
from areal.tinker.service.verbs.weights import LoadWeights, SaveForSampler, SaveWeights


def test_alpha_of_a_model_is_stored(tmp_path: Path) -> None:
    """The rows of a model and of its checkpoint describe the adapter, also to a server that is started again."""

    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            model = await new_model(service, alpha=16.0)
            saved = await done(service, SaveWeights(model, 1, digest(1), path="one"))
        async with serving(tmp_path, FakeTraining()) as service:
            assert spec_of(await service.parts.runs.row(model)).alpha == 16.0
            assert spec_of((await service.parts.registry.find(saved["path"]))[1]).alpha == 16.0

    asyncio.run(main())


def test_train_save_sample_and_resume(tmp_path: Path) -> None:
    async def main() -> None:
        training, sampling = FakeTraining(), FakeSampling()
        async with serving(tmp_path, training, sampling) as service:
            session = await service.create_session(["test"])
            model = await new_model(service, session)
            assert model == f"{session}:train:0"
            info = await service.get_info(model)
            assert info["model_data"]["model_name"] == "base"
            assert info["lora_rank"] == 4
            # Train.
            result = await done(service, train(model, 1))
            assert isinstance(result, PassResult)
            assert result.logprobs[0].shape == (3,)
            assert await done(service, step(model, 2, learning_rate=0.5)) == {
                "type": "optim_step",
                "metrics": {"grad_norm:mean": 1.0},
            }
            # Save.
            saved = await done(service, SaveWeights(model, 3, digest(3), path="one"))
            assert saved["path"] == f"tinker://{model}/weights/one"
            named = await done(service, SaveForSampler(model, 4, digest(4), path="one"))
            assert named["path"] == f"tinker://{model}/sampler_weights/one"
            ephemeral = await done(service, SaveForSampler(model, 5, digest(5), sampling_session_seq_id=7))
            # Train on: snapshots keep their weights.
            await done(service, train(model, 6))
            await done(service, step(model, 7, learning_rate=0.5))
            by_path = await service.create_sampling_session(session, 8, model_path=named["path"])
            of_base = await service.create_sampling_session(session, 9, base_model="alias")
            for name, weight in ((ephemeral["sampling_session_id"], 1.0), (by_path, 1.0), (of_base, 0.0)):
                answer = await done(service, sample(name, 0, num_samples=2))
                assert isinstance(answer, SamplingResult)
                assert len(answer.answers) == 2
                assert answer.answers[0].logprobs[0] == weight
            # Resume.
            info = await service.weights_info(saved["path"])
            assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("base", 4, False)
            created = await done(
                service, CreateFromCheckpoint(session, 1, digest(8), path=saved["path"], optimizer=True)
            )
            assert created["model_id"] == f"{session}:train:1"
            assert training.models[created["model_id"]]["weight"] == 1.0
            assert (await service.get_info(created["model_id"]))["lora_rank"] == 4
            await done(service, LoadWeights(model, 8, digest(9), path=saved["path"]))
            assert training.models[model]["weight"] == 1.0
            assert (await done(service, UnloadModel(model, None, digest(10))))["model_id"] == model
            await asyncio.sleep(0.05)
            assert model not in training.models
            assert len(training.threads) == 1
        assert training.closed
        assert sampling.closed

    asyncio.run(main())


def test_status_has_curves_queue_and_counters(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), None) as service:
            model = await new_model(service, await service.create_session(display_name="my run"))
            for seq in (1, 2):
                await done(service, train(model, seq))
            status = await service.status()
            assert [point["seq_id"] for point in status["losses"][model]] == [1, 2]
            assert all(np.isfinite(point["loss"]) and point["tokens"] == 3 for point in status["losses"][model])
            assert {"kind": "forward_backward", "result": "done", "count": 2} in status["requests"]
            [described] = status["models"]
            assert (described["model_id"], described["name"], described["owner"]) == (model, "my run", "local")
            assert status["tokens"] == {"training": 6, "sampling": 0}
            assert min(status["memory"].values()) > 0
            assert status["seconds"]["forward_backward"] >= 0
            assert service.parts.trouble() is None
            assert (await service.capabilities())["supported_models"][0]["sampleable"] is False

    asyncio.run(main())
