"""Requests, models and settings that the backend refuses behind SkyRL's interface, and the loss of its ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed: make test-skyrl")

from skyrl.tinker import types

from areal.integrations.skyrl.backend import ArealBackend
from areal.integrations.skyrl.config import ArealBackendConfig
from areal.tests.grid.models import model_dir
from areal.tests.skyrl.requests import datum, lora, question, request, run, sample, step
from areal.tinker.backends.errors import BackendLostError


def picture() -> types.ForwardBackwardInput:
    wanted = request("cross_entropy", 1)
    wanted.data[1].model_input.chunks.append(types.ImageAssetPointerChunk(format="png", location="x.png"))
    return wanted


def short() -> types.ForwardBackwardInput:
    return types.ForwardBackwardInput(data=[datum(5, 1, "weights", weights=[1.0, 1.0])], loss_fn="cross_entropy")


def with_values() -> types.Datum:
    item = datum(2, 1, "logprobs", "advantages")
    item.loss_fn_inputs.values = types.TensorData(data=[0.5, 0.5])
    return item


REFUSED: dict[str, tuple[Callable[[], types.ForwardBackwardInput], str]] = {
    "a loss of critics": (lambda: request("ppo_critic", 1), "loss_fn is 'ppo_critic': this server supports cispo, "),
    "another loss": (lambda: request("dppo", 1), "loss_fn is 'dppo': this server supports"),
    "an option": (
        lambda: request("ppo", 1, {"value_clip": 0.2}),
        r"loss_fn_config of ppo has the unknown keys \['value_clip'\]: supported are \['clip_high",
    ),
    "an image": (picture, r"data\[1\].model_input has a chunk of kind 'image_asset_pointer'"),
    "another length": (short, r"data\[0\].loss_fn_inputs\['weights'\] has the shape \[2\]: it must be \[5\]"),
    "a negative weight": (
        lambda: types.ForwardBackwardInput(
            data=[datum(2, 1, "logprobs", "advantages", weights=[1.0, -2.0])], loss_fn="ppo"
        ),
        r"data\[0\].loss_fn_inputs\['weights'\] has the element -2.0: it must be at least 0",
    ),
    "weights of another length": (
        lambda: types.ForwardBackwardInput(data=[datum(2, 1, "logprobs", "advantages", weights=[1.0])], loss_fn="ppo"),
        r"data\[0\].loss_fn_inputs\['weights'\] has the shape \[1\]: it must be \[2\]",
    ),
    "no log-probs": (
        lambda: types.ForwardBackwardInput(data=[datum(2, 1, "advantages")], loss_fn="ppo"),
        r"data\[0\].loss_fn_inputs lacks \['logprobs'\]",
    ),
    "a number that is not finite": (
        lambda: types.ForwardBackwardInput(
            data=[datum(2, 1, "weights", weights=[1.0, float("nan")])], loss_fn="cross_entropy"
        ),
        "has a NaN",
    ),
    "values of a critic": (
        lambda: types.ForwardBackwardInput(data=[with_values()], loss_fn="ppo"),
        r"data\[0\].loss_fn_inputs has the unknown keys \['values'\]",
    ),
    "no samples": (lambda: types.ForwardBackwardInput(data=[], loss_fn="cross_entropy"), "data is empty"),
    "an overflow": (
        lambda: types.ForwardBackwardInput(
            data=[datum(2, 1, "logprobs", "advantages", logprobs=[-1e30, -1e30])], loss_fn="importance_sampling"
        ),
        "finite",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_request_fails_alone(fault: str, backend: ArealBackend) -> None:
    """The others of its batch have the bits of a batch without it, and so has the step."""
    make, message = REFUSED[fault]
    good = {"1": ("a", request("cross_entropy", 1)), "3": ("b", request("ppo", 2))}
    outcomes = []
    for bad in ({}, {"2": ("a", make())}):
        for model in ("a", "b"):
            backend.create_model(model, lora())
        results = run(backend, {**good, **bad})
        outcomes.append(({name: results[name] for name in good}, [step(backend, model) for model in ("a", "b")]))
        for model in ("a", "b"):
            backend.delete_model(model)
    assert outcomes[0] == outcomes[1]
    assert isinstance(results["2"], types.ErrorResponse)
    assert results["2"].status == "failed"
    assert re.search(message, results["2"].error), results["2"].error


@pytest.mark.parametrize(
    ("config", "role", "message"),
    [
        (lora(), "critic", "model_role = 'critic' with backend = 'areal', which supports 'policy'"),
        (lora(0), "policy", "lora_config.rank is 0: it must be an integer from 1 to 128"),
        (lora(4, 0.0), "policy", "lora_config.alpha is 0.0: it must be above 0"),
        (lora(train_attn=False, train_mlp=False), "policy", "lora_config trains no layers: at least one of train_attn"),
    ],
)
def test_refused_models(config: types.LoraConfig, role: str, message: str, backend: ArealBackend) -> None:
    with pytest.raises(ValueError, match=message):
        backend.create_model("a", config, role)
    assert not backend.has_model("a")
    backend.create_model("a", lora())


def test_refused_settings() -> None:
    with pytest.raises(ValueError, match="has no field 'backnd': did you mean 'backend'"):
        ArealBackendConfig(backnd="fsdp:d1")
    with pytest.raises(ValueError, match="EngineBackendConfig has no field 'alhpa': did you mean 'alpha'"):
        ArealBackend(model_dir("qwen3"), ArealBackendConfig(backend_config={"alhpa": 3}))
    with pytest.raises(ValueError, match="backend = 'fdsp': installed are fsdp, jax, megatron"):
        ArealBackend(model_dir("qwen3"), ArealBackendConfig(backend="fdsp:d1"))


def test_samples_without_a_sampler_are_refused(backend: ArealBackend, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sampler = None in --backend-config: .* set it to 'vllm'"):
        sample(backend, tmp_path, {"1": ("", question())})


def test_lost_backend_starts_again_without_models(
    backend: ArealBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend.create_model("a", lora())
    backend.save_checkpoint(tmp_path / "a.tar.gz", "a")

    def lost(*_: Any) -> None:
        raise BackendLostError("a rank has died")

    with monkeypatch.context() as patch:
        patch.setattr(backend.trainer.backend, "optim_step", lost)
        with pytest.raises(BackendLostError, match="a rank has died"):
            step(backend, "a")
    assert not backend.has_model("a")
    backend.create_model("a", lora())
    backend.load_checkpoint(tmp_path / "a.tar.gz", "a")
    run(backend, {"1": ("a", request("cross_entropy", 1))})
    step(backend, "a")
