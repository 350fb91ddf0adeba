"""Models, passes and steps: order, faults of one request, isolation, and torch's own AdamW."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.refused import NEEDS_RESET
from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import (
    STEP,
    data,
    datum,
    gradients,
    request,
    run,
    same,
    scaled,
    trained,
    weights,
)
from areal.tinker.backends.errors import BackendLostError, ServerError, UserError
from areal.tinker.backends.prepared import AdamParams, AdapterSpec, Datum, PassResult, PreparedBatch
from areal.tinker.backends.training.engine_backend import EngineBackend
from areal.utils.distributed import EngineLostError

INFINITE = scaled(data("logprobs", "advantages"), 1e30, "logprobs")
"""Data whose ratios overflow."""


# ---- models


def test_capabilities(backend: EngineBackend) -> None:
    limits = backend.limits()
    assert (limits.vocab_size, limits.max_tokens, limits.max_rank) == (VOCAB, 256, 128)
    assert backend.optimizers() == {"adamw"}
    assert set(backend.losses()) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
    assert backend.healthy()


@pytest.mark.parametrize(
    "kinds", [{"attention": False}, {"mlp": False, "head": False}, {"mlp": False, "attention": False}, {}]
)
def test_adapter_has_the_rank_and_the_layers_of_its_description(backend: EngineBackend, kinds: dict[str, bool]) -> None:
    backend.create_model("s:train:0", AdapterSpec(3, seed=5, **kinds))
    made = weights(backend, "s:train:0")
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in made}
    wanted = {
        "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mlp": {"gate_proj", "up_proj", "down_proj"},
        "head": {"lm_head"},
    }
    assert layers == set().union(*(names for kind, names in wanted.items() if kinds.get(kind, True)))
    assert {min(x.shape) for x in made.values()} == {3}
    assert not any(x.any() for name, x in made.items() if "lora_B" in name)


def test_seed_decides_the_initial_factors(backend: EngineBackend) -> None:
    for model, seed in (("a", 5), ("b", 5), ("c", 6), ("d", None), ("e", None)):
        backend.create_model(model, AdapterSpec(4, seed=seed))
    a, b, c, d, e = (weights(backend, model) for model in "abcde")
    assert same(a, b)
    assert not same(a, c)
    assert not same(d, e)


def test_scale_is_alpha_by_rank(start: Start) -> None:
    """With twice the alpha and half the factor ``B``, log-probs are the same."""
    results = []
    for alpha in (32.0, 64.0):
        made = start(alpha=alpha)
        trained(made, "a", rank=8)
        config = made.group.run(lambda engine, _: {t.scale for t in engine.adapters["model-0"].plan.targets})[0]
        results.append(config)
    assert results == [{4.0}, {8.0}]


def test_alpha_of_a_model(start: Start, tmp_path: Path) -> None:
    """A model with an alpha has the bits of a model on a server with that alpha, also after a load on a third server."""
    wide, narrow, third = start(alpha=64.0), start(alpha=16.0), start(alpha=8.0)
    wide.create_model("a", AdapterSpec(4, seed=7))
    narrow.create_model("a", AdapterSpec(4, seed=7, alpha=64.0))
    narrow.create_model("default", AdapterSpec(4, seed=7))
    for seed in range(3):
        samples = data("weights", seed=seed)
        logprobs = [run(made, request("a", samples)).logprobs for made in (wide, narrow)]
        other = run(narrow, request("default", samples)).logprobs
        assert all(np.array_equal(x, y) for x, y in zip(*logprobs, strict=True))
        assert seed == 0 or not np.array_equal(other[0], logprobs[1][0])
        for made, model in ((wide, "a"), (narrow, "a"), (narrow, "default")):
            made.optim_step(model, STEP)
    # The description is that of the model, and a checkpoint keeps its scale.
    for model, alpha in (("a", 64.0), ("default", 16.0)):
        narrow.save(model, tmp_path / model)
        assert third.load(model, tmp_path / model, with_optimizer=True) == AdapterSpec(4, seed=7, alpha=alpha)
        expected, actual = (run(made, request(model, data("weights"))).logprobs for made in (narrow, third))
        assert all(np.array_equal(x, y) for x, y in zip(expected, actual, strict=True))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_alpha_that_is_no_scale_is_refused(backend: EngineBackend, alpha: float) -> None:
    with pytest.raises(UserError, match=r"lora_config.alpha = .*: it must be a finite number above 0"):
        backend.create_model("a", AdapterSpec(4, alpha=alpha))
    assert not backend.models


def test_models_are_refused(backend: EngineBackend, start: Start) -> None:
    trained(backend, "a", steps=0)
    for adapter, message in (
        (AdapterSpec(4), "model_id = 'a': there is such a model already"),
        (AdapterSpec(0), "lora_config.rank = 0: choose a rank from 1 to 128"),
        (AdapterSpec(129), "lora_config.rank = 129"),
        (AdapterSpec(4, attention=False, mlp=False, head=False), "train_attn, train_mlp and train_unembed"),
    ):
        with pytest.raises(UserError, match=message):
            backend.create_model("a" if adapter == AdapterSpec(4) else "b", adapter)
    unknown = request("b", data("weights"))
    for call in (
        lambda: backend.delete("b"),
        lambda: backend.optim_step("b", STEP),
        lambda: [_raise(x) for x in backend.forward([unknown])],
        lambda: [_raise(x) for x in backend.forward_backward([unknown])],
    ):
        with pytest.raises(UserError, match=r"model_id = 'b': there is no such model"):
            call()
    few = start(max_models=1)
    trained(few, "a", steps=0)
    with pytest.raises(UserError, match=r"the server has 1 models, and can have 1"):
        trained(few, "b")


def test_layers_that_a_model_does_not_have(start: Start) -> None:
    """Experts cannot have adapters: the error says which switch of the client leaves them out. A tied head has one."""
    experts, tied = start(model=model_dir("qwen3_moe")), start(model=model_dir("qwen3_tied"))
    with pytest.raises(
        UserError, match=r"experts of this model cannot .* leave 'mlp' out.* train_mlp .*select .*'mlp'"
    ):
        experts.create_model("a", AdapterSpec(4))
    for made, kinds in ((experts, {"mlp": False}), (tied, {})):
        before = run(made, request(trained(made, "a", **kinds), data("weights", seed=100))).metrics["loss:sum"]
        made.optim_step("a", AdamParams(1e-3))
        assert run(made, request("a", data("weights", seed=100))).metrics["loss:sum"] < before


def test_short_memory_is_reported_and_delete_releases_it(start: Start) -> None:
    made = start(adapter_memory_mb=1)
    empty = made.group.memory()
    # All layers of rank 32: 34,304 numbers of 4 bytes, four times: weights, gradient, two moments.
    trained(made, "a", rank=32)
    before = made.group.memory()
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"memory is short .*rank = 32.*needs (\d\.\d) MiB .* and 0\.\d MiB are available on rank 0"
        ):
            made.create_model("b", AdapterSpec(32))
    assert made.group.memory() == before
    assert len(made.group.adapters.names) == 2
    made.delete("a")
    assert made.group.adapters.names == ("default",)
    assert made.group.memory() == empty
    made.create_model("b", AdapterSpec(32))
    made.create_model("c", AdapterSpec(24))


def _raise(result: Any) -> None:
    if isinstance(result, Exception):
        raise result


# ---- passes


def test_outputs_are_in_the_callers_order(backend: EngineBackend) -> None:
    """Also where micro-batches are packed in another order: each sample alone has the same log-probs."""
    samples = data("weights", lengths=(30, 2, 25, 1, 60, 3, 17))
    trained(backend, "a")
    result = run(backend, request("a", samples))
    for sample, logprobs in zip(samples, result.logprobs, strict=True):
        assert (logprobs.dtype, logprobs.shape) == (np.float32, sample.target_ids.shape)
        alone = run(backend, request("a", [sample])).logprobs[0]
        np.testing.assert_allclose(logprobs, alone, rtol=1e-5, atol=1e-5)


def test_sample_longer_than_a_micro_batch(backend: EngineBackend) -> None:
    trained(backend, "a", steps=0)
    assert run(backend, request("a", data("weights", lengths=(200, 3)))).logprobs[0].shape == (200,)


def test_forward_changes_no_gradient(backend: EngineBackend) -> None:
    trained(backend, "a")
    run(backend, request("a", data("weights")))
    before = gradients(backend, "a")
    backend.forward([request("a", data("weights", seed=1))])
    assert same(gradients(backend, "a"), before)


def test_arrays_of_a_request_may_be_read_only(backend: EngineBackend) -> None:
    trained(backend, "a", steps=0)
    sample = datum(5, 0, "weights")
    frozen = [
        np.frombuffer(x.tobytes(), dtype=x.dtype)
        for x in (sample.input_ids, sample.target_ids, sample.values["weights"])
    ]
    result = run(backend, request("a", [Datum(frozen[0], frozen[1], {"weights": frozen[2]})]))
    assert np.array_equal(result.logprobs[0], run(backend, request("a", [sample])).logprobs[0])


# ---- a request fails alone


@pytest.mark.parametrize("earlier", [pytest.param(0), 1, pytest.param(2)])
def test_failing_request_adds_nothing(backend: EngineBackend, earlier: int) -> None:
    """After no, one or two requests, and before others: the gradient is that without it, to the bit."""
    good = [request("{}", data("weights", seed=seed)) for seed in range(3)]
    bad = request("a", INFINITE, "importance_sampling")
    others = [request("c", data("weights"))]
    for model in "abc":
        trained(backend, model)
    calls = [dataclasses.replace(x, model_id="a") for x in good]
    results = backend.forward_backward([*calls[:earlier], bad, *others, *calls[earlier:]])
    failed = results[earlier]
    assert isinstance(failed, UserError)
    assert "the loss must be finite" in str(failed)
    assert "discarded" not in str(failed)
    assert [isinstance(result, PassResult) for result in results] == [index != earlier for index in range(5)]
    run(backend, *(dataclasses.replace(x, model_id="b") for x in good))
    expected = gradients(backend, "b")
    backend.forward([request("a", data("weights"))])
    assert same(gradients(backend, "a"), expected)
    # And so are the steps.
    steps = [backend.optim_step(model, STEP) for model in "ab"]
    assert steps[0] == steps[1]
    assert same(weights(backend, "a"), weights(backend, "b"))


def test_request_that_fails_alone_leaves_nothing_pending(backend: EngineBackend) -> None:
    for model in "ab":
        trained(backend, model)
    assert isinstance(backend.forward_backward([request("a", INFINITE, "importance_sampling")])[0], UserError)
    assert not backend.models["a"].pending
    assert [backend.optim_step(model, STEP) for model in "ab"] == [{"grad_norm:mean": 0.0}] * 2
    assert same(weights(backend, "a"), weights(backend, "b"))


@NEEDS_RESET
def test_error_of_the_model_is_an_error_of_the_server(backend: EngineBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients of an earlier request, which are kept."""
    trained(backend, "a")
    run(backend, request("a", data("weights")))
    before = gradients(backend, "a")

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("areal.engine.model.packed_lm.PackedCausalLM.forward", fails)
        failed = backend.forward_backward([request("a", data("weights"))])[0]
    assert isinstance(failed, ServerError)
    assert not isinstance(failed, BackendLostError)
    assert "out of memory in micro-batch 0" in str(failed)
    assert "lower backend_config.max_tokens_per_mb" in str(failed)
    assert backend.healthy()
    assert same(gradients(backend, "a"), before)


# ---- isolation


def test_interleaved_models_equal_models_alone_to_the_bit(backend: EngineBackend) -> None:
    """Models of different ranks, layers and settings, with refused requests and steps in between."""
    plan: dict[str, Any] = {
        "a": (AdapterSpec(2, seed=1), AdamParams(0.01)),
        "b": (AdapterSpec(16, seed=2, head=False), AdamParams(0.03, beta2=0.9, weight_decay=0.1)),
        "c": (AdapterSpec(5, seed=3, mlp=False), AdamParams(0.02, grad_clip_norm=0.5)),
    }

    def work(model: str, name: str, number: int) -> list[Any]:
        first = backend.forward_backward([request(name, data("weights", seed=number))])
        second = backend.forward_backward([request(name, data("logprobs", "advantages", seed=number), "ppo")])
        return [*first, *second]

    def outcome(name: str, results: list[Any]) -> Any:
        return [(x.metrics, [y.tobytes() for y in x.logprobs]) for x in results], weights(backend, name)

    alone = {}
    for model, (adapter, params) in plan.items():
        backend.create_model(f"alone-{model}", adapter)
        results: list[Any] = []
        for number in range(2):
            results += work(model, f"alone-{model}", number)
            backend.optim_step(f"alone-{model}", params)
        alone[model] = outcome(f"alone-{model}", results)

    together: dict[str, list[Any]] = {model: [] for model in plan}
    for model, (adapter, _) in plan.items():
        backend.create_model(model, adapter)
    for number in range(2):
        for model in "bca":
            together[model] += work(model, model, number)
            backend.forward_backward([request("a", INFINITE, "importance_sampling")])
        for model in "cab":
            if model == "c":
                backend.create_model("short", AdapterSpec(3))
                run(backend, request("short", data("weights")))
                backend.delete("short")
            backend.optim_step(model, plan[model][1])
    for model in plan:
        mine, theirs = outcome(model, together[model]), alone[model]
        assert mine[0] == theirs[0]
        assert same(mine[1], theirs[1])


# ---- loss of the engine


def test_lost_engine_needs_a_restart(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made = start()
    trained(made, "a")
    expected = run(made, request("a", data("weights")))

    def lost(*_: Any, **__: Any) -> Any:
        raise EngineLostError("a rank is gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(made.group), "forward_backward", lost)
        with pytest.raises(BackendLostError, match=r"processes were lost, and all models with them.*a rank is gone"):
            made.forward_backward([request("a", data("weights"))])
    assert not made.healthy()
    for call in (
        lambda: made.forward([request("a", data("weights"))]),
        lambda: made.optim_step("a", STEP),
        lambda: made.create_model("b", AdapterSpec(4)),
    ):
        with pytest.raises(BackendLostError):
            call()
    made.restart()
    assert made.healthy()
    with pytest.raises(UserError, match=r"no such model"):
        made.delete("a")
    trained(made, "a")
    again = run(made, request("a", data("weights")))
    assert again.metrics == expected.metrics
    made.close()
    made.close()
    assert not made.healthy()
    with pytest.raises(BackendLostError, match="closed"):
        made.forward([request("a", data("weights"))])


# ---- numbers


def test_logprobs_are_those_of_the_model_at_temperature_1(backend: EngineBackend, reference_model: Any) -> None:
    backend.create_model("a", AdapterSpec(4))
    samples = data("weights")
    result = run(backend, request("a", samples))
    for sample, logprobs in zip(samples, result.logprobs, strict=True):
        logits: Tensor = reference_model(torch.tensor(sample.input_ids)[None]).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.target_ids)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float64).eval().requires_grad_(False)


def test_requests_of_several_models_in_one_call(backend: EngineBackend) -> None:
    for model, rank in (("a", 2), ("b", 8)):
        trained(backend, model, rank)
    batches: list[PreparedBatch] = [request(model, data("weights", seed=seed)) for seed, model in enumerate("abab")]
    results = backend.forward_backward(batches)
    single = [backend.forward([batch])[0] for batch in batches]
    for result, other in zip(results, single, strict=True):
        assert isinstance(result, PassResult)
        assert isinstance(other, PassResult)
        assert all(np.array_equal(x, y) for x, y in zip(result.logprobs, other.logprobs, strict=True))
