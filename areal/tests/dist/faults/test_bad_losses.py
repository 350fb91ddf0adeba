"""Invalid losses and gradients: a bad loss on one rank raises on all ranks, and a non-finite gradient skips the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import Batch, LossFn, Metric, TokenOutputs
from areal.tests.dist.faults.twins import DISCARDED, explode, infinite_slope, raised, twins
from areal.tests.harness.tiny import chosen, gradients_of, layouts, loss, same_bits, weights_of
from areal.tests.harness.world import world


def late(first: LossFn, later: LossFn) -> LossFn:
    """Return one loss in the first micro-batch and another in all later ones."""
    calls = 0

    def both(out: TokenOutputs, batch: Batch) -> Any:
        nonlocal calls
        calls += 1
        return first(out, batch) if calls == 1 else later(out, batch)

    return both


def goes_back(out: TokenOutputs, batch: Batch) -> Tensor:
    """Call backward, as a loop that is moved into a loss function does."""
    result = loss(out, batch)
    result.backward(retain_graph=True)
    return result


def penalised(out: TokenOutputs, batch: Batch) -> Tensor:
    """Return a loss with its gradient in the log-probs as a factor, which calls backward for the outputs only."""
    result = loss(out, batch)
    (slope,) = torch.autograd.grad(result, out.logprobs, retain_graph=True)
    return result * (1 + 0 * slope.square().sum())


def refuse(out: TokenOutputs, batch: Batch) -> Tensor:
    raise ValueError("clip_eps = -1: choose a positive number")


BAD_LOSSES: dict[str, tuple[Callable[[], LossFn], type[Exception], tuple[str, ...]]] = {
    "raises": (lambda: explode, RuntimeError, ("KeyError", "no such column")),
    "raises a ValueError": (lambda: refuse, ValueError, ("clip_eps = -1",)),
    "raises late": (lambda: late(loss, explode), RuntimeError, ("KeyError",)),
    "goes back": (lambda: goes_back, ValueError, ("called backward itself", "return the loss")),
    "nan": (lambda: lambda o, b: loss(o, b) * torch.nan, ValueError, ("returned nan", "micro-batch 0", "samples [", "finite")),
    "inf": (lambda: lambda o, b: loss(o, b) + torch.inf, ValueError, ("returned inf", "'loss'")),
    "nan late": (lambda: late(loss, lambda o, b: loss(o, b) * torch.nan), ValueError, ("returned nan", "micro-batch 1")),
    "no graph": (lambda: lambda o, b: loss(o, b).detach(), ValueError, ("micro-batch 0", "no graph", "TokenOutputs")),
    "by token": (lambda: lambda o, b: o.logprobs, ValueError, ("shape (", "scalar tensor", "sum over the micro-batch")),
    "number": (lambda: lambda o, b: 1.5, ValueError, ("float", "scalar tensor")),
    "nothing": (lambda: lambda o, b: None, ValueError, ("NoneType", "scalar tensor")),
    "other terms": (lambda: lambda o, b: {"policy": loss(o, b)}, ValueError, ("['policy']", "['loss']", "a weight of its own")),
    "term by token": (lambda: lambda o, b: {"loss": o.logprobs}, ValueError, ("'loss'", "shape (")),
    "missing output": (lambda: lambda o, b: o.entropy.sum(), ValueError, ("'entropy'", "outputs=('logprobs', 'entropy')")),
    "missing key": (lambda: lambda o, b: o.logprobs @ b["rewards"], RuntimeError, ("no key 'rewards'", "'reward'")),
    "bare metric": (lambda: lambda o, b: (loss(o, b), {"kl": 0.5}), ValueError, ("'kl'", "0.5", "Metric(")),
    "metric by token": (lambda: lambda o, b: (loss(o, b), {"kl": Metric(o.logprobs)}), ValueError, ("'kl'", "scalars")),
    "unknown metric": (lambda: lambda o, b: (loss(o, b), {"kl": Metric(0.5, reduce="median")}), ValueError, ("'kl'", "median", "'mean'|'sum'")),
    "no dict of metrics": (lambda: lambda o, b: (loss(o, b), 0.5), RuntimeError, ("AttributeError",)),
}  # fmt: skip
"""Fault -> (creates the loss of the faulty rank, type of the error, its message)."""


@pytest.mark.parametrize("backend", [*layouts(1, 2, also=("fsdp:p2",)), *chosen("jax:d1", "jax:d2")])
def test_invalid_loss_on_one_rank_raises_on_all_ranks(backend: str) -> None:
    with twins(backend, mb_spec={"n_mbs": 2}) as pair:
        for i, (name, (make, kind, says)) in enumerate(BAD_LOSSES.items()):
            loss_fn = make() if pair.is_guilty else loss
            with raised(kind, *says, DISCARDED, guilty=pair.guilty):
                (pair.engine.train_batch if i % 2 else pair.engine.forward_backward)(pair.batch(), loss_fn)
                pytest.fail(f"{name} was accepted")
            pair.check()


@pytest.mark.parametrize("backend", [*layouts(1), *chosen("fsdp:p2", "jax:d1")])
def test_loss_may_compute_gradients_of_its_outputs(backend: str) -> None:
    with twins(backend) as pair:
        found, expected = (
            engine.train_batch(pair.batch(), its) for engine, its in ((pair.engine, penalised), (pair.untouched, loss))
        )
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_invalid_loss_in_eval_keeps_gradients(backend: str) -> None:
    with twins(backend) as pair:
        for engine in (pair.engine, pair.untouched):
            engine.forward_backward(pair.batch(), loss)
        for wrong in (explode, lambda o, b: loss(o, b) * torch.nan):
            with raised(ValueError if wrong is not explode else RuntimeError, guilty=pair.guilty):
                pair.engine.eval_batch(pair.batch(), wrong if pair.is_guilty else loss)
        assert same_bits(gradients_of(pair.engine), gradients_of(pair.untouched))
        assert pair.engine.optimizer_step() == pair.untouched.optimizer_step()
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_invalid_loss_discards_accumulated_gradients(backend: str) -> None:
    with twins(backend) as pair:
        pair.engine.forward_backward(pair.batch(1), loss)
        with raised(RuntimeError, "no such column", DISCARDED, guilty=pair.guilty):
            pair.engine.forward_backward(pair.batch(), explode if pair.is_guilty else loss)
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_metric_with_two_reductions_raises(backend: str) -> None:
    def reported(kind: Any) -> LossFn:
        return lambda out, batch: (loss(out, batch), {"kl": Metric(0.5, reduce=kind)})

    with twins(backend, mb_spec={"n_mbs": 2}) as pair:
        with raised(ValueError, "'kl'", "'mean'", "'sum'", "choose one"):
            pair.engine.train_batch(pair.batch(), late(reported("mean"), reported("sum")))
        pair.check()
        if pair.engine.dp_size > 1:
            with raised(ValueError, "'kl'", "'mean'", "'max'"):
                pair.engine.train_batch(pair.batch(), reported("max" if pair.is_guilty else "mean"))
            pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_non_finite_gradient_skips_step(backend: str) -> None:
    with twins(backend) as pair:
        pair.check()
        engine, before = pair.engine, weights_of(pair.engine)
        rate = engine.lr
        step = engine.train_batch(pair.batch(), infinite_slope if pair.is_guilty else loss)
        assert step.update_successful is False
        assert step.loss == pytest.approx(engine.eval_batch(pair.batch(), loss).loss, rel=1e-5)
        assert step.grad_norm is not None
        assert not torch.isfinite(torch.tensor(step.grad_norm))
        assert engine.lr == rate == step.lr
        assert same_bits(before, weights_of(engine))
        # Also with the optimizer called by hand, where a finite gradient was accumulated before.
        engine.forward_backward(pair.batch(), loss)
        engine.forward_backward(pair.batch(), infinite_slope if pair.is_guilty else loss)
        assert engine.optimizer_step().update_successful is False
        assert engine.lr == rate
        pair.check()


@pytest.mark.world(2)
def test_all_faulty_ranks_are_named() -> None:
    with twins("fsdp:d2") as pair:
        with raised(RuntimeError, "rank 0, 1: KeyError: 'no such column'"):
            pair.engine.train_batch(pair.batch(), explode)
        with raised(RuntimeError, "rank 0: clip_eps = -1", "rank 1: KeyError"):
            pair.engine.train_batch(pair.batch(), explode if world().rank else refuse)
        pair.check()
