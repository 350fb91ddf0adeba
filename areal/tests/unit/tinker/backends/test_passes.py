"""Requests of several models that share a call of the engine."""

from __future__ import annotations

import numpy as np
import pytest

from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import STEP, data, gradients, request, same, trained
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.losses.loss_table import make_loss
from areal.tinker.backends.prepared import PassResult, PreparedBatch
from areal.tinker.backends.training.engine_backend import EngineBackend
from areal.tinker.backends.training.passes import Pass, divide_into_calls, engine_samples

SHORT = (5, 9, 4)
RL = ("logprobs", "advantages")


@pytest.fixture(scope="module")
def sharing(start: Start) -> EngineBackend:
    return start(max_shared_tokens=64, max_tokens_per_mb=48)


@pytest.fixture
def models(sharing: EngineBackend) -> EngineBackend:
    """Pairs of equal models: ``a`` and ``A``, ``b`` and ``B``, ``c`` and ``C``."""
    for model_id in list(sharing.models):
        sharing.delete(model_id)
    for rank, pair in ((2, "aA"), (8, "bB"), (4, "cC")):
        for model_id in pair:
            trained(sharing, model_id, rank, seed=rank)
    return sharing


def requests(models: str) -> list[PreparedBatch]:
    """One request for each model, with a loss and a configuration of its own."""
    return [
        request(models[0], data(*RL, seed=1, lengths=SHORT), "ppo"),
        request(models[1], data(*RL, seed=2, lengths=(11, 3)), "ppo", clip_low_threshold=0.9, clip_high_threshold=1.01),
        request(models[2], data(*RL, seed=3, lengths=(20,)), "importance_sampling"),
    ]


def test_requests_that_share_a_call_have_the_results_of_separate_calls(
    models: EngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models.batches_models()
    calls: list[int] = []
    right = models.group.forward_backward
    monkeypatch.setattr(
        models.group, "forward_backward", lambda batch, *a, **k: (calls.append(len(batch)), right(batch, *a, **k))[1]
    )
    together = models.forward_backward(requests("abc"))
    assert calls == [6]
    alone = [models.forward_backward([each])[0] for each in requests("ABC")]
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, PassResult)
        assert isinstance(other, PassResult)
        assert [x.shape for x in one.logprobs] == [x.shape for x in other.logprobs]
        for x, y in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-6)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-5)
        assert one.metrics.keys() >= {"loss:sum", "ratio:mean"}
    # Each model has its own gradient, and its own step.
    for pair in ("aA", "bB", "cC"):
        shared, separate = (gradients(models, model_id) for model_id in pair)
        for name, gradient in shared.items():
            np.testing.assert_allclose(gradient, separate[name], atol=1e-5, err_msg=name)
        norms = [models.optim_step(model_id, STEP)["grad_norm:mean"] for model_id in pair]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_bad_request_in_a_shared_call_fails_alone(models: EngineBackend) -> None:
    """The others have the gradients of separate calls, to the bit, in addition to those of earlier requests."""
    for model_id in "aAbB":
        assert isinstance(models.forward_backward([request(model_id, data(*RL, lengths=SHORT), "ppo")])[0], PassResult)
    infinite = data(*RL, lengths=SHORT)
    infinite[1].values["logprobs"][:] = -1e4
    good = requests("abc")
    results = models.forward_backward([good[0], request("c", infinite, "ppo"), good[1]])
    assert [isinstance(result, PassResult) for result in results] == [True, False, True]
    assert isinstance(results[1], UserError)
    assert not models.models["c"].pending
    for each in requests("ABC")[:2]:
        models.forward_backward([each])
    assert same(gradients(models, "a"), gradients(models, "A"))
    assert same(gradients(models, "b"), gradients(models, "B"))


def as_pass(adapter: str, *lengths: int, loss: str = "ppo") -> Pass:
    batch = request(adapter, data(*(RL if loss == "ppo" else ("weights",)), lengths=lengths), loss)
    made = make_loss(loss, {})
    return Pass(batch, adapter, made, engine_samples(batch.data, made))


def test_requests_of_one_model_keep_their_order() -> None:
    passes = [as_pass("a", 5), as_pass("b", 5), as_pass("a", 6), as_pass("b", 9), as_pass("c", 7)]
    assert list(divide_into_calls(passes, 20)) == [[0, 1, 4], [2, 3]]


def test_long_requests_and_those_of_another_form_run_alone() -> None:
    passes = [
        as_pass("a", 5),
        as_pass("b", 21),
        as_pass("c", 3),
        as_pass("d", 4, loss="cross_entropy"),
        as_pass("e", 8),
    ]
    assert list(divide_into_calls(passes, 20)) == [[0, 4], [1], [2], [3]]
    assert list(divide_into_calls(passes, 0)) == [[0], [1], [2], [3], [4]]
