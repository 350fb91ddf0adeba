"""Verbs that train as plain calls: validation, failures alone, weights of any loss, and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal.api import Batch, TokenOutputs
from areal.tests.unit.tinker.backends.reference import datum
from areal.tests.unit.tinker.service.fakes import FakeTraining, floats, integers, tokens
from areal.tinker.backends.errors import BackendLostError, UserError
from areal.tinker.backends.losses.elementwise import NOT_LINEAR, elementwise_loss
from areal.tinker.backends.losses.loss_table import loss_keys, make_loss
from areal.tinker.backends.prepared import Datum
from areal.tinker.direct.trainer import DirectTrainer, PassOutput, PassRequest
from areal.tinker.service.requests import RawDatum

LORA = {"rank": 4, "alpha": 16.0, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": False}


def raw(**values: tuple[float, ...]) -> RawDatum:
    """Return a sample of three tokens with these values."""
    named = {name: floats(*each) for name, each in values.items()}
    return RawDatum(tokens(1, 2, 3), {"target_tokens": integers(2, 3, 4), **named})


def supervised(*weights: float) -> PassRequest:
    return PassRequest("a", [raw(weights=weights or (0.0, 1.0, 1.0))])


def clipped(**values: tuple[float, ...]) -> PassRequest:
    return PassRequest("a", [raw(**{"logprobs": (-1.0, -1.0, -1.0), **values})], "ppo")


@pytest.fixture
def backend() -> FakeTraining:
    return FakeTraining()


@pytest.fixture
def trainer(backend: FakeTraining) -> DirectTrainer:
    trainer = DirectTrainer(backend)
    trainer.create_model("a", LORA)
    return trainer


def test_refused_request_fails_alone(trainer: DirectTrainer, backend: FakeTraining) -> None:
    requests = {
        "1": supervised(),
        "2": PassRequest("a", []),
        "3": PassRequest("a", [raw()], "dppo"),
        "4": PassRequest("a", [RawDatum(tokens(63, 2, 3), raw(weights=(1.0, 1.0, 1.0)).loss_fn_inputs)]),
        "5": supervised(1.0, 1.0, 1.0),
    }
    outputs = trainer.forward_backward(requests)
    assert outputs.keys() == requests.keys()
    messages = ("data is empty", "loss_fn is 'dppo': this server supports", "63 is not liked")
    for name, message in zip("234", messages, strict=True):
        assert isinstance(outputs[name], UserError)
        assert message in str(outputs[name])
    # Only the fourth of the three has reached the backend, and gradients are those of the first and the last.
    assert backend.calls[-1] == ("forward_backward", ("a", "a", "a"), (1, 63, 1))
    assert backend.models["a"]["grad"] == 5.0
    for name, weights in (("1", (0.0, 1.0, 1.0)), ("5", (1.0, 1.0, 1.0))):
        output = outputs[name]
        assert isinstance(output, PassOutput)
        np.testing.assert_allclose(output.losses[0], -output.logprobs[0] * np.float32(weights), rtol=1e-6)
        assert np.sum(output.losses[0]) == pytest.approx(output.metrics["loss:sum"])


def test_weights_multiply_a_clipped_loss(trainer: DirectTrainer, backend: FakeTraining) -> None:
    # Where the weight is 0, the log-prob is a placeholder.
    weighted = clipped(advantages=(1.0, -2.0, 3.0), weights=(0.5, 2.0, 0.0), logprobs=(-1.0, -1.0, -9999.0))
    scaled = clipped(advantages=(0.5, -4.0, 0.0))
    outputs = trainer.forward({"weighted": weighted, "scaled": scaled})
    first, second = outputs["weighted"], outputs["scaled"]
    assert isinstance(first, PassOutput)
    assert isinstance(second, PassOutput)
    np.testing.assert_array_equal(first.losses, second.losses)
    assert np.count_nonzero(first.losses[0]) == 2
    assert backend.models["a"]["grad"] == 0.0
    trainer.forward_backward({"weighted": weighted})
    assert backend.models["a"]["grad"] == -3.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": (1.0, -2.0, 1.0)}, r"data\[0\].loss_fn_inputs\['weights'\] has the element -2.0: it must be at"),
        ({"weights": (1.0,)}, r"loss_fn_inputs\['weights'\] has the shape \[1\]: it must be \[3\]"),
        ({"weights": (1.0, float("nan"), 1.0)}, "NaN"),
        ({"returns": (1.0, 1.0, 1.0)}, r"unknown keys \['returns'\]"),
    ],
)
def test_refused_weights(values: dict[str, Any], message: str, trainer: DirectTrainer) -> None:
    output = trainer.forward({"1": clipped(advantages=(1.0, 1.0, 1.0), **values)})["1"]
    with pytest.raises(UserError, match=message):
        raise output  # type: ignore[misc]


def total(name: str, sample: Datum, logprobs: np.ndarray) -> float:
    """Return the loss of a sample."""
    values = {key: torch.tensor(x) for key, x in sample.values.items()} | {
        "target_ids": torch.tensor(sample.target_ids)
    }
    offsets = torch.tensor([0, len(logprobs)], dtype=torch.int32)
    return float(make_loss(name, {})(TokenOutputs(logprobs=torch.tensor(logprobs)), Batch(values, offsets))[0])


@pytest.mark.parametrize("targets", [0, 2])
@pytest.mark.parametrize("name", sorted(loss_keys()))
def test_losses_of_targets_are_those_of_the_targets_alone(name: str, targets: int) -> None:
    """The loss of a target is that of the sample with a weight or advantage of 0 for all others."""
    sample = datum(5, 1, *sorted(loss_keys()[name]["inputs"] - {"target_tokens"}), targets=targets)
    logprobs = np.random.default_rng(2).normal(-4, 1, sample.target_ids.shape).astype(np.float32)
    losses = elementwise_loss(name, {}, sample, logprobs)
    if name in NOT_LINEAR:
        assert losses is None
        return
    assert losses is not None
    # Weights that are left out are 1.
    factor = "advantages" if "advantages" in sample.values else "weights"
    factors = sample.values.get(factor, np.ones_like(logprobs))
    for place in np.ndindex(logprobs.shape):
        alone = np.zeros_like(logprobs)
        alone[place] = factors[place]
        others = Datum(sample.input_ids, sample.target_ids, {**sample.values, factor: alone})
        assert losses[place] == pytest.approx(total(name, others, logprobs), rel=1e-5, abs=1e-6)


def test_lost_backend_starts_again_without_models(
    trainer: DirectTrainer, backend: FakeTraining, tmp_path: Path
) -> None:
    trainer.save("a", tmp_path / "saved")
    backend.lost = True
    with pytest.raises(BackendLostError, match="a worker died"):
        trainer.optim_step("a", {"learning_rate": 0.1})
    assert backend.calls[-1] == ("restart",)
    assert not trainer.models
    trainer.load("a", tmp_path / "saved")
    assert trainer.models["a"].rank == 4
    trainer.delete_model("a")
    assert not backend.models
    trainer.close()
    assert backend.closed


def test_adapters_and_steps_are_validated(trainer: DirectTrainer, backend: FakeTraining) -> None:
    with pytest.raises(UserError, match=r"lora_config\.rank is 0: it must be an integer from 1 to 16"):
        trainer.create_model("b", {**LORA, "rank": 0})
    with pytest.raises(UserError, match="memory is short"):
        trainer.create_model("b", {**LORA, "rank": 13})
    assert trainer.models.keys() == {"a"}
    with pytest.raises(UserError, match=r"adam_params.beta1 is 1.0: it must be in \[0, 1\)"):
        trainer.optim_step("a", {"beta1": 1.0})
    assert trainer.optim_step("a", {"learning_rate": 0.1}) == {"grad_norm:mean": 1.0}
