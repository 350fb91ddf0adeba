"""Options of one call: its micro-batches, evaluation mode, dtype and names of streamed weights; learning rates as parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api import FinetuneSpec, MicroBatchSpec, OptimizerConfig
from areal.engine.registry import create_engine
from areal.tests.harness.tiny import (
    config,
    global_batch,
    gpt2_dir,
    gradients_of,
    layouts,
    local_batch,
    loss,
    started,
    weights_of,
)

CONSTANT = OptimizerConfig(lr=0.01)
BY_SAMPLES = MicroBatchSpec(samples_per_mb=2)


@pytest.mark.parametrize("backend", layouts(1, 2, also=("jax:d1",)))
def test_spec_of_a_call_cuts_its_batch_and_changes_no_number(backend: str) -> None:
    """Of all verbs with a batch; the next call is cut as configured."""
    with started(backend, optimizer=CONSTANT) as engine:
        batch = local_batch(engine, global_batch())
        configured = [mb.sample_ids for mb in engine.microbatches(batch).real]
        pairs = [mb.sample_ids for mb in engine.microbatches(batch, mb_spec=BY_SAMPLES).real]
        assert [i for pair in pairs for i in pair] == list(range(len(batch)))
        assert {len(pair) for pair in pairs[:-1]} == {2}
        assert pairs != configured

        expected, actual = engine.forward_batch(batch), engine.forward_batch(batch, mb_spec=BY_SAMPLES)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)

        def gradients(**given: Any) -> tuple[float, int, dict[str, Any]]:
            step = engine.forward_backward(batch, loss, **given)
            gathered = gradients_of(engine)
            engine.zero_grad()
            return step.loss, step.n_mbs, gathered

        plain, n_plain, expected_gradients = gradients()
        cut, n_cut, actual_gradients = gradients(mb_spec=BY_SAMPLES)
        assert n_plain != n_cut
        assert cut == pytest.approx(plain, rel=1e-5)
        torch.testing.assert_close(actual_gradients, expected_gradients, rtol=0, atol=2e-5)
        assert engine.eval_batch(batch, loss, mb_spec=BY_SAMPLES).loss == pytest.approx(plain, rel=1e-5)
        assert [mb.sample_ids for mb in engine.microbatches(batch).real] == configured
        assert engine.train_batch(batch, loss, mb_spec=BY_SAMPLES).n_mbs == n_cut


@pytest.mark.world(1)
def test_spec_of_a_call_decides_on_long_sequences_and_prefixes() -> None:
    short = MicroBatchSpec(max_tokens_per_mb=20, overlong="drop")
    with started("fsdp:d1") as engine:
        dropped = sum(len(sample["input_ids"]) > 20 for sample in global_batch())
        assert engine.eval_batch(global_batch(), loss, mb_spec=short).metrics["dropped_sequences"] == dropped > 0
        assert "dropped_sequences" not in engine.eval_batch(global_batch(), loss).metrics
        with pytest.raises(ValueError, match=r"above MicroBatchSpec\.max_tokens_per_mb = 20"):
            engine.eval_batch(global_batch(), loss, mb_spec=MicroBatchSpec(max_tokens_per_mb=20))
        shared = engine.microbatches(global_batch(), mb_spec=MicroBatchSpec(share_prefixes=True))
        assert shared[0].tree is not None
    with (
        started("fsdp:d1", fsdp={"attention": "rows"}) as engine,
        pytest.raises(
            ValueError,
            match=r"mb_spec\.share_prefixes = True, but this model, or a layer of it, runs one sequence per row",
        ),
    ):
        engine.forward_batch(global_batch(), mb_spec=MicroBatchSpec(share_prefixes=True))


@pytest.mark.world(2)
def test_spec_of_a_call_allows_one_batch_on_all_data_parallel_ranks() -> None:
    with started("fsdp:d2") as engine:
        with pytest.raises(ValueError, match="passed the same batch"):
            engine.eval_batch(global_batch(), loss)
        allowed = MicroBatchSpec(max_tokens_per_mb=40, equal_batches="allow")
        assert engine.eval_batch(global_batch(), loss, mb_spec=allowed).update_successful is None
        with pytest.raises(ValueError, match="passed the same batch"):
            engine.eval_batch(global_batch(), loss)


# Megatron and JAX support no family with dropout.
@pytest.mark.parametrize("backend", layouts(1, 2, engine="fsdp", but=("fsdp:p2",)))
def test_evaluating_disables_dropout_of_a_pass_and_restores_it(backend: str) -> None:
    with started(backend, path=gpt2_dir(resid_pdrop=0.2)) as engine:
        batch = local_batch(engine, global_batch())
        mbs = engine.microbatches(batch)

        def passed() -> list[torch.Tensor]:
            return engine.forward_backward_batch(mbs, lambda out, mb: (None, out.logprobs.detach()), forward_only=True)

        dropped = passed()
        with engine.evaluating():
            kept = passed()
            assert all(map(torch.equal, kept, passed()))
        expected = engine.forward_batch(batch)
        torch.testing.assert_close(mbs.restore(kept), expected, rtol=0, atol=0)
        # Each rank has samples whose tokens are dropped.
        assert not all(map(torch.equal, dropped, kept))
        assert not all(map(torch.equal, passed(), kept))


@pytest.mark.parametrize("backend", layouts(1, 2, also=("jax:d1",)))
def test_named_tensors_in_a_dtype_and_by_name(backend: str) -> None:
    with started(backend) as engine:
        everything = weights_of(engine)
        halves = dict(engine.named_tensors(dtype=torch.bfloat16, select=lambda name: "layers.1." in name))
        assert set(halves) == {name for name in everything if "layers.1." in name}
        assert len(halves) > 5
        assert all(torch.equal(half, everything[name].bfloat16()) for name, half in halves.items())
        assert {tensor.dtype for _, tensor in engine.named_tensors()} == {torch.float32}


@pytest.mark.parametrize("backend", layouts(1, 2, also=("jax:d1", "fsdp:t2", "megatron:d2")))
def test_local_tensors_of_all_ranks_are_the_weights(backend: str) -> None:
    with started(backend) as engine:
        expected = weights_of(engine)
        parts = [
            (part.name, part.tensor.double().numpy(), part.box, part.shape)
            for part in engine.local_tensors(dtype=torch.float64, select=lambda name: "norm" not in name)
        ]
        assert {name for name, *_ in parts} <= {name for name in expected if "norm" not in name}
        full: dict[str, torch.Tensor] = {}
        for name, values, box, shape in (part for parts in engine.control.gather(parts) for part in parts):
            full.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))[box] = torch.from_numpy(values)
        assert set(full) == {name for name in expected if "norm" not in name}
        assert all(torch.equal(tensor, expected[name].double()) for name, tensor in full.items())


@pytest.mark.parametrize("backend", layouts(1, 2, also=("jax:d1",)))
def test_schedule_of_the_caller_sets_parameter_groups(backend: str) -> None:
    """Without a number of steps. It never ends, and each step has the rate that was set."""
    engine = create_engine(config(backend, optimizer=CONSTANT))
    engine.initialize(FinetuneSpec())
    with engine:
        batch = local_batch(engine, global_batch())
        (group,) = engine.param_groups
        assert dict(group) == {"lr": 0.01}
        for rate in (0.0, 0.02, 0.005):
            group["lr"] = rate
            assert engine.lr == rate
            assert engine.train_batch(batch, loss).lr == rate
        assert engine.param_groups[0]["lr"] == 0.005
        for key, value, message in (("eps", 1.0, "'lr' alone"), ("lr", -1.0, "at least 0")):
            with pytest.raises(ValueError, match=message):
                group[key] = value


@pytest.mark.world(1)
def test_schedule_of_the_engine_refuses_parameter_groups_and_an_unknown_length() -> None:
    with started("fsdp:d1") as engine, pytest.raises(ValueError, match=r"lr_scheduler = 'linear'.*would multiply it"):
        engine.param_groups[0]["lr"] = 0.1
    engine = create_engine(config("fsdp:d1"))
    with pytest.raises(
        ValueError, match=r"FinetuneSpec.total_train_steps = None with optimizer.lr_scheduler = 'linear'"
    ):
        engine.initialize(FinetuneSpec())


def test_samples_and_a_budget_exclude_each_other() -> None:
    for other in ({"max_tokens_per_mb": 8}, {"n_mbs": 2}):
        with pytest.raises(ValueError, match=r"samples_per_mb = 4 with .* leave one of them out"):
            MicroBatchSpec(samples_per_mb=4, **other)
    with pytest.raises(ValueError, match="samples_per_mb = 3 with granularity = 2: choose a multiple"):
        MicroBatchSpec(samples_per_mb=3, granularity=2)
