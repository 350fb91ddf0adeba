"""SkyRL's API server and engine process with our backend, and a client of the published SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed: make test-skyrl")

import tinker
from tinker import types

from areal.tests.skyrl.marks import SAMPLES
from areal.tests.skyrl.server import KEY, SkyrlServer, serving
from areal.tests.tinker.sdk.server import model_with_tokenizer

pytestmark = pytest.mark.timeout(600)

ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyrlServer]:
    with serving(tmp_path_factory.mktemp("server"), model) as server:
        yield server


@pytest.fixture(scope="module")
def sampling_server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyrlServer]:
    with serving(tmp_path_factory.mktemp("server"), model, "local") as server:
        yield server


def client(server: SkyrlServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


def data(seed: int, loss: str) -> list[types.Datum]:
    random = np.random.default_rng(seed)

    def sample(length: int) -> types.Datum:
        inputs: dict[str, Any] = {"target_tokens": random.integers(0, 100, length)}
        if loss != "cross_entropy":
            inputs |= {"logprobs": random.normal(size=length) - 5, "advantages": random.normal(size=length)}
        arrays = {name: x.astype(np.int64 if name == "target_tokens" else np.float32) for name, x in inputs.items()}
        tensors = {name: types.TensorData.from_numpy(x) for name, x in arrays.items()}
        return types.Datum(
            model_input=types.ModelInput.from_ints(random.integers(0, 100, length).tolist()), loss_fn_inputs=tensors
        )

    return [sample(length) for length in (5, 20)]


def steps(training: tinker.TrainingClient, count: int = 3) -> list[Any]:
    """Train for some steps. Returns losses and log-probs of each."""
    out = []
    for seed in range(count):
        for loss in ("cross_entropy", "importance_sampling", "ppo"):
            result = training.forward_backward(data(seed, loss), loss).result()
            logprobs = [each["logprobs"].data for each in result.loss_fn_outputs]
            losses = [sum(each["elementwise_loss"].data) for each in result.loss_fn_outputs]
            assert sum(losses) == pytest.approx(result.metrics["loss:sum"], rel=1e-4, abs=1e-3)
            out.append((result.metrics, logprobs))
        training.optim_step(ADAM).result()
    return out


def test_state_is_saved_and_loaded(server: SkyrlServer) -> None:
    """Also into another model, and after a refused request, which leaves no gradient."""
    service = client(server)
    assert [each.model_name for each in service.get_server_capabilities().supported_models] == [server.model]
    training = service.create_lora_training_client(base_model=server.model, rank=4, seed=7)
    steps(training, 1)
    saved = training.save_state("one").result().path
    expected = steps(training)
    training.load_state(saved).result()
    with pytest.raises(ValueError, match=r"ids must be from 0 to"):
        training.forward_backward([_unknown_token()], "cross_entropy").result()
    assert steps(training) == expected
    other = service.create_training_client_from_state(saved)
    assert steps(other) == expected
    assert training.forward(data(0, "ppo"), "ppo").result().metrics["loss:sum"] == pytest.approx(
        other.forward(data(0, "ppo"), "ppo").result().metrics["loss:sum"], rel=1e-7
    )


def _unknown_token() -> types.Datum:
    inputs = {"target_tokens": types.TensorData(data=[1, 2], dtype="int64", shape=[2])}
    return types.Datum(model_input=types.ModelInput.from_ints([1, 10**6]), loss_fn_inputs=inputs)


def test_samples_without_a_sampler_are_refused(server: SkyrlServer) -> None:
    sampling = client(server).create_sampling_client(base_model=server.model)
    params = types.SamplingParams(max_tokens=4, seed=1)
    with pytest.raises(ValueError, match="sampler = None in --backend-config"):
        sampling.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result()


@SAMPLES
def test_samples_of_trained_weights(sampling_server: SkyrlServer) -> None:
    """Log-probs of answers and of prompts are those of the trained model, which then learns from them."""
    service = client(sampling_server)
    training = service.create_lora_training_client(base_model=sampling_server.model, rank=4, seed=7)
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=6, seed=1)
    answers = []
    for _ in range(2):
        steps(training, 1)
        sampling = training.save_weights_and_get_sampling_client()
        result = sampling.sample(prompt, 2, params, include_prompt_logprobs=True).result()
        answers.append([sequence.tokens for sequence in result.sequences])
        data = []
        for sequence in result.sequences:
            tokens = [1, 2, 3, *sequence.tokens]
            zeros = [0.0] * 2
            advantages = [*zeros, *[1.0] * len(sequence.tokens)]
            inputs = {
                "target_tokens": np.array(tokens[1:], np.int64),
                "logprobs": np.array([*zeros, *sequence.logprobs], np.float32),
                "advantages": np.array(advantages, np.float32),
            }
            tensors = {name: types.TensorData.from_numpy(x) for name, x in inputs.items()}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors))
        scored = training.forward_backward(data, "importance_sampling").result()
        assert scored.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-4)
        for sequence, each in zip(result.sequences, scored.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(sequence.logprobs, each["logprobs"].data[2:], atol=1e-4)
            np.testing.assert_allclose(result.prompt_logprobs, each["logprobs"].data[:2], atol=1e-4)
        training.optim_step(ADAM).result()
    assert answers[0] != answers[1]
    base = service.create_sampling_client(base_model=sampling_server.model).sample(prompt, 1, params).result()
    assert base.sequences[0].tokens not in answers[1]


def test_stale_session_loses_its_models(model: str, tmp_path: Path) -> None:
    options = ("--session-cleanup-interval-sec", "1", "--session-timeout-sec", "1")
    with serving(tmp_path, model, None, *options) as server:
        training = client(server).create_lora_training_client(base_model=server.model, rank=4)
        limit = time.monotonic() + 60
        while "Deleted model" not in server.text:
            assert time.monotonic() < limit, server.text
            time.sleep(0.2)
        with pytest.raises(ValueError, match="not loaded"):
            training.forward(data(0, "cross_entropy"), "cross_entropy").result()
