"""The backend behind SkyRL's interface, with the batches that SkyRL's engine makes, against plain torch in float64."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed: make test-skyrl")

import skyrl
import torch
from safetensors.torch import load_file
from skyrl.tinker import engine, types
from skyrl.utils.storage import download_and_unpack

import areal.integrations.skyrl
from areal.integrations.skyrl.backend import ArealBackend
from areal.integrations.skyrl.config import ArealBackendConfig
from areal.integrations.skyrl.engine import register
from areal.tests.harness.world import record
from areal.tests.skyrl.conftest import Start
from areal.tests.skyrl.marks import PINNED, SAMPLES
from areal.tests.skyrl.reference import PlainModel
from areal.tests.skyrl.requests import LOSSES, lora, question, request, run, sample, step

LAYOUTS = ("fsdp:d1", "megatron:d1", "jax:d1")
STEPS = 4
MODELS = {"a": lora(4, 16.0, seed=3), "b": lora(8, 64.0, seed=4, train_unembed=True)}


def rows(output: types.ForwardBackwardOutput, name: str) -> list[list[float]]:
    return [each[name]["data"] for each in output.loss_fn_outputs]


def error(actual: Any, expected: Any) -> float:
    """Return the largest difference, relative above 1."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (actual, expected))
    return float((abs(a - b) / np.maximum(1, abs(b))).max())


def weights(backend: ArealBackend, model: str, folder: Path) -> dict[str, torch.Tensor]:
    backend.save_sampler_checkpoint(folder / f"{model}.tar.gz", model)
    with download_and_unpack(folder / f"{model}.tar.gz") as unpacked:
        return load_file(unpacked / "adapter_model.safetensors")


# ---- numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_models_train_as_in_plain_torch(layout: str, start: Start, tmp_path: Path) -> None:
    """Three requests of each of two models, with their own rank and alpha, in one batch of SkyRL, for some steps."""
    backend, plain = start(layout), {}
    for model, config in MODELS.items():
        backend.create_model(model, config)
        backend.save_sampler_checkpoint(tmp_path / f"{model}-first.tar.gz", model)
        plain[model] = PlainModel(tmp_path / f"{model}-first.tar.gz", config)
    errors = dict.fromkeys(("loss", "elementwise", "logprobs", "norm", "weights"), 0.0)

    def widen(name: str, actual: Any, expected: Any) -> None:
        errors[name] = max(errors[name], error(actual, expected))

    for number in range(STEPS):
        requests = {
            f"{model} {loss}": (model, request(loss, 10 * number + k, config))
            for model in MODELS
            for k, (loss, config) in enumerate(LOSSES.items())
        }
        results = run(backend, requests)
        assert results.keys() == requests.keys()
        for name, (model, wanted) in requests.items():
            expected, actual = plain[model].run(wanted), results[name]
            widen("loss", actual.metrics["loss:sum"], sum(float(losses.sum()) for losses, _ in expected))
            for k, (losses, logprobs) in enumerate(expected):
                widen("elementwise", rows(actual, "elementwise_loss")[k], losses)
                widen("logprobs", rows(actual, "logprobs")[k], logprobs)
        for model in MODELS:
            widen("norm", step(backend, model)["grad_norm:mean"], plain[model].step())
    for model in MODELS:
        actual = weights(backend, model, tmp_path)
        assert actual.keys() == plain[model].weights.keys()
        for name, expected in plain[model].weights.items():
            widen("weights", actual[name], expected.detach())
    record(
        "SkyRL: 4 steps of 2 models against plain torch in float64",
        layout,
        **{k: f"{x:.0e}" for k, x in errors.items()},
    )
    assert max(errors.values()) <= 1e-4, errors


def test_models_have_the_layers_and_the_seed_of_their_description(backend: ArealBackend, tmp_path: Path) -> None:
    kinds = {"attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}
    kinds["unembed"] = {"lm_head"}
    for kind, layers in kinds.items():
        backend.create_model(kind, lora(3, **{f"train_{each}": each == kind for each in kinds}))
        made = weights(backend, kind, tmp_path)
        assert {name.partition(".lora_")[0].rpartition(".")[2] for name in made} == layers
        assert {min(x.shape) for x in made.values()} == {3}
    drawn = []
    for number, seed in enumerate((5, 5, 6)):
        backend.create_model(f"{number}", lora(seed=seed))
        drawn.append(weights(backend, f"{number}", tmp_path))
    assert all(torch.equal(x, drawn[1][name]) for name, x in drawn[0].items())
    assert not any(torch.equal(x, drawn[2][name]) for name, x in drawn[0].items() if "lora_A" in name)


def test_cispo_has_the_thresholds_of_skyrl(backend: ArealBackend, tmp_path: Path) -> None:
    backend.create_model("a", MODELS["a"])
    backend.save_sampler_checkpoint(tmp_path / "first.tar.gz", "a")
    plain, wanted = PlainModel(tmp_path / "first.tar.gz", MODELS["a"]), request("cispo", 5)
    expected, actual = plain.run(wanted), run(backend, {"1": ("a", wanted)})["1"]
    for k, (losses, _) in enumerate(expected):
        assert error(rows(actual, "elementwise_loss")[k], losses) <= 1e-5
    assert error(step(backend, "a")["grad_norm:mean"], plain.step()) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_loaded_model_has_the_bits_of_the_saved_one(layout: str, start: Start, tmp_path: Path) -> None:
    """After a delete, over a forward and three more steps: weights and moments are those of the save."""
    backend, wanted = start(layout), request("ppo", 1)

    def history() -> list[Any]:
        out: list[Any] = [run(backend, {"1": ("a", wanted)}, train=False)["1"]]
        for number in range(3):
            out += [run(backend, {"1": ("a", request("cross_entropy", number))})["1"], step(backend, "a")]
        return out

    backend.create_model("a", MODELS["a"])
    run(backend, {"1": ("a", request("cross_entropy", 9))})
    step(backend, "a")
    backend.save_checkpoint(tmp_path / "a" / "0001.tar.gz", "a")
    expected = history()
    assert expected[0] != run(backend, {"1": ("a", wanted)}, train=False)["1"]
    backend.delete_model("a")
    assert not backend.has_model("a")
    # A new model with other factors, whose gradient does not survive the load.
    backend.create_model("a", lora(4, 16.0, seed=8))
    run(backend, {"1": ("a", request("cross_entropy", 9))})
    backend.load_checkpoint(tmp_path / "a" / "0001.tar.gz", "a")
    assert history() == expected


def test_forward_leaves_gradients_alone(backend: ArealBackend) -> None:
    norms = []
    for model in ("a", "b"):
        backend.create_model(model, lora())
        run(backend, {"1": (model, request("cross_entropy", 1))})
        if model == "b":
            run(backend, {"1": (model, request("cross_entropy", 2))}, train=False)
        norms.append(step(backend, model))
    assert norms[0] == norms[1]


# ---- samples


@pytest.fixture(scope="module")
def sampling(start: Start) -> ArealBackend:
    return start(sampler="local")


@SAMPLES
def test_samples_are_those_of_the_snapshot(sampling: ArealBackend, tmp_path: Path) -> None:
    """Log-probs of an answer are those of a forward of the model at the time of its snapshot."""
    sampling.create_model("a", lora())
    for name in ("one", "two"):
        run(sampling, {"1": ("a", request("cross_entropy", 1))})
        step(sampling, "a", learning_rate=0.1)
        sampling.save_sampler_checkpoint(tmp_path / "a" / "sampler_weights" / f"{name}.tar.gz", "a", persist=False)
        answers = sample(
            sampling,
            tmp_path,
            {
                "1": ("a", question(name, answers=3, scored=True)),
                "2": ("", question()),
                "3": ("a", question(name, top_k=0)),
                "4": ("a", question(name)),
                "5": ("a", question(name, answers=0)),
            },
        )
        assert "top_k is 0" in answers["3"].error
        assert "num_samples = 0" in answers["5"].error
        assert len({tuple(sequence.tokens) for sequence in answers["1"].sequences}) > 1
        assert answers["4"].sequences[0].tokens == answers["1"].sequences[0].tokens
        assert error(answers["2"].sequences[0].logprobs, answers["4"].sequences[0].logprobs) > 1e-3
        for sequence in answers["1"].sequences:
            tokens = [5, 6, 7, 8, *sequence.tokens]
            item = types.Datum(
                loss_fn_inputs=types.LossFnInputs(
                    target_tokens=types.TensorData(data=tokens[1:] + [0]),
                    weights=types.TensorData(data=[1.0] * len(tokens)),
                    advantages=types.TensorData(data=[]),
                    logprobs=types.TensorData(data=[]),
                ),
                model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)]),
            )
            wanted = types.ForwardBackwardInput(data=[item], loss_fn="cross_entropy")
            expected = rows(run(sampling, {"1": ("a", wanted)}, train=False)["1"], "logprobs")[0]
            assert error(sequence.logprobs, expected[3:-1]) <= 1e-4
            assert error(answers["1"].prompt_logprobs, expected[:3]) <= 1e-4
    # One snapshot of a model is in memory.
    assert len(sampling.sampler.snapshots) == 1
    lost = sample(sampling, tmp_path, {"1": ("a", question("three")), "2": ("", question())})
    assert "three.tar.gz" in lost["1"].error
    assert lost["2"].sequences[0].tokens == answers["2"].sequences[0].tokens
    sampling.delete_model("a")
    assert not sampling.sampler.snapshots


@PINNED
def test_sampler_names_the_release_that_it_needs(start: Start) -> None:
    with pytest.raises(ValueError, match=r"transformers.*5\.19"):
        start(sampler="local")


# ---- SkyRL's door


def test_registration_leaves_other_backends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "get_backend_classes", engine.get_backend_classes)
    register()
    assert engine.get_backend_classes("areal", use_ray=False) == (ArealBackend, ArealBackendConfig)
    with pytest.raises(ValueError, match=r"Unknown backend: other\. Available backends: jax, fsdp, megatron"):
        engine.get_backend_classes("other")


def test_other_release_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyrl, "__version__", "0.4.0")
    with pytest.warns(UserWarning, match=r"SkyRL 0\.4\.0: areal\.integrations\.skyrl was tested with 0\.3\.0"):
        importlib.reload(areal.integrations.skyrl)
