"""Per-token outputs compared with transformers in float64: every output, temperatures, and the caller's order and form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from areal.api import Batch, MicroBatchSpec, TokenOutputs, TopK, TrainEngine
from areal.tests.grid.cases import as_input, rows
from areal.tests.grid.models import VOCAB
from areal.tests.grid.reference import Reference
from areal.tests.harness.tiny import (
    Sample,
    family_dir,
    global_batch,
    gradients_of,
    layouts,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.utils.data import where_trained

EVERYTHING = ("logprobs", "entropy", "values", "logits", "hidden", TopK(5))
TOLERANCE = 2e-5


def expected_outputs(samples: list[Sample], head: Tensor | None, temperature: float = 1.0) -> list[TokenOutputs]:
    reference = Reference(family_dir("qwen3"), temperature=temperature, value_head=head)
    with torch.no_grad():
        return [reference.outputs(sample) for sample in samples]


def close(actual: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    assert actual.shape == expected.shape
    assert not actual.requires_grad
    assert (actual.double() - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("backend", layouts(1, 2))
@pytest.mark.parametrize("form", ["padded", "list"])
def test_every_output_equals_transformers(backend: str, form: str) -> None:
    with started(backend, value_head=True, init_from_scratch=False) as engine:
        samples = local_batch(engine, global_batch())
        lengths = [len(sample["input_ids"]) for sample in samples]
        head = weights_of(engine)["value_head.weight"]
        actual = engine.forward_batch(as_input(samples, form), outputs=EVERYTHING)
        assert list(actual) == ["logprobs", "entropy", "values", "logits", "hidden", "topk"]
        by_row = {name: rows(actual[name], lengths) for name in ("logprobs", "entropy", "values", "logits", "hidden")}
        for i, expected in enumerate(expected_outputs(samples, head)):
            for name, value in by_row.items():
                close(value[i], getattr(expected, name))
            assert by_row["logprobs"][i][-1] == 0.0
            best = expected.logits.log_softmax(-1).topk(5)
            ids, logprobs = rows(actual["topk"].ids, lengths)[i], rows(actual["topk"].logprobs, lengths)[i]
            close(logprobs, best.values)
            close(expected.logits.log_softmax(-1).gather(-1, ids), best.values)
        alone = engine.forward_batch(as_input(samples, form), outputs=("entropy",))
        assert all(map(torch.equal, rows(alone, lengths), by_row["entropy"]))


@pytest.mark.parametrize("backend", layouts(1, 2, 4, also=("megatron:t2",)))
@pytest.mark.parametrize("form", ["padded", "list"])
def test_step_returns_outputs_without_changing_the_gradient(backend: str, form: str) -> None:
    names = ("logprobs", "entropy", TopK(3))
    with started(backend) as engine:
        samples = local_batch(engine, global_batch())
        # A micro-batch without weight has outputs, too.
        samples = [{**sample, "loss_mask": sample["loss_mask"] * (i > 1)} for i, sample in enumerate(samples)]
        batch, lengths = as_input(samples, form), [len(sample["input_ids"]) for sample in samples]
        plain = engine.forward_backward(batch, loss)
        assert plain.outputs == {}
        expected = gradients_of(engine)
        engine.zero_grad()
        step = engine.forward_backward(batch, loss, returns=names)
        assert step.loss == plain.loss
        assert same_bits(gradients_of(engine), expected)
        engine.zero_grad()

        evaluated = engine.eval_batch(batch, loss, returns=names)
        trained = engine.train_batch(batch, loss, returns=names)
        assert trained.update_successful
        reference = expected_outputs(samples, None)
        for found in (step.outputs, evaluated.outputs, trained.outputs):
            assert list(found) == ["logprobs", "entropy", "topk"]
            for name in ("logprobs", "entropy"):
                assert isinstance(found[name], list) == (form == "list")
                for row, want in zip(rows(found[name], lengths), reference, strict=True):
                    close(row, getattr(want, name))
            best = [want.logits.log_softmax(-1).topk(3).values for want in reference]
            for row, want in zip(rows(found["topk"].logprobs, lengths), best, strict=True):
                close(row, want)
        with pytest.raises(ValueError, match=r"returns = \('logprob',\): name some of"):
            engine.forward_backward(batch, loss, returns=("logprob",))
        # Requests of a sum may be without any weight.
        nothing = [{**sample, "loss_mask": sample["loss_mask"] * 0} for sample in samples]
        step = engine.forward_backward(as_input(nothing, form), loss, normalization="sum", returns=("logprobs",))
        assert step.loss == 0.0
        assert all(row.any() for row, n in zip(rows(step.outputs["logprobs"], lengths), lengths, strict=True) if n > 1)
        assert not any(gradient.any() for gradient in gradients_of(engine).values())


@pytest.mark.world(1)
def test_value_head_starts_at_zero_and_trains() -> None:
    with started("fsdp:d1", value_head=True) as engine:
        assert not weights_of(engine)["value_head.weight"].any()
        assert not any(row.any() for row in engine.forward_batch(global_batch(), outputs=("values",)))

        def regression(out: TokenOutputs, batch: object) -> Tensor:
            return (out.values - 1.0).square().sum()

        def count(batch: dict) -> Tensor:
            return torch.tensor(float(len(batch["input_ids"])))

        losses = [engine.train_batch(global_batch(), regression, count, outputs=("values",)).loss for _ in range(4)]
        assert losses[0] == pytest.approx(1.0)
        assert losses[-1] < losses[0]
        assert weights_of(engine)["value_head.weight"].any()


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_temperature_from_config_or_per_sequence(backend: str) -> None:
    with started(backend, temperature=0.5) as engine:
        samples = local_batch(engine, global_batch())
        own = [{**sample, "temperature": torch.tensor(0.25 + 0.5 * i)} for i, sample in enumerate(samples)]
        for batch in (samples, own):
            actual = engine.forward_batch(batch, outputs=("logprobs", "entropy", "logits"))
            for i, expected in enumerate(expected_outputs(batch, None, temperature=0.5)):
                for name in actual:
                    close(actual[name][i], getattr(expected, name))

        def nll(out: TokenOutputs, batch: dict) -> Tensor:
            return -out.logprobs.sum()

        def one(batch: dict) -> Tensor:
            return torch.ones(())

        total = -sum(out.logprobs.sum() for out in expected_outputs(own, None))
        actual = engine.global_sum(torch.tensor(total.item())).item()
        step = engine.eval_batch(own, nll, one)
        assert step.loss * step.metrics["weight"] == pytest.approx(actual, rel=1e-5)


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_multiple_targets_per_position(backend: str) -> None:
    with started(backend) as engine:
        generator = torch.Generator().manual_seed(5)
        samples = []
        for sample in local_batch(engine, global_batch()):
            targets = torch.randint(0, VOCAB, (len(sample["input_ids"]), 3), generator=generator)
            targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
            samples.append({"input_ids": sample["input_ids"], "target_ids": targets})
        actual = engine.forward_batch(samples)
        for row, sample, expected in zip(actual, samples, expected_outputs(samples, None), strict=True):
            close(row, expected.logprobs)
            assert not row[sample["target_ids"] == -100].any()


@pytest.mark.parametrize("backend", layouts(1, 2, also=("megatron:t2", "megatron:c2")))
def test_output_mask_zeros_unwanted_positions_only(backend: str) -> None:
    with started(backend) as engine:
        samples = [dict(sample) for sample in local_batch(engine, global_batch())]
        for i, sample in enumerate(samples):
            mask = sample["loss_mask"]
            # no output of the first sequence is requested
            sample["loss_mask"] = mask * (torch.arange(len(mask)) % 3 == 0) * (i > 0)
        asked = [where_trained(sample) for sample in samples]
        names = ("logprobs", "entropy", TopK(3))
        full, actual = engine.forward_batch(samples, outputs=names), engine.forward_batch(asked, outputs=names)
        for i, sample in enumerate(asked):
            wanted = sample["output_mask"]
            for all_of, some in zip(each_of(full, i), each_of(actual, i), strict=True):
                assert torch.allclose(some[wanted].double(), all_of[wanted].double(), rtol=1e-5, atol=1e-6)
                assert not some[~wanted].any()
        assert any(sample["output_mask"].any() for sample in asked)
        assert_same_gradient(engine, samples, asked)


def each_of(result: dict, sample: int) -> list[Tensor]:
    """Return log-probs, entropy, and the log-probs and ids of top-k of one sample."""
    top = result["topk"]
    return [result["logprobs"][sample], result["entropy"][sample], top.logprobs[sample], top.ids[sample]]


def assert_same_gradient(engine: TrainEngine, *batches: list[Sample]) -> None:
    """Compare gradients of a loss that weighs log-probs and entropy at the wanted positions."""

    def policy(out: TokenOutputs, batch: Batch) -> Tensor:
        return -((out.logprobs.exp() + 0.1 * out.entropy) * batch["loss_mask"]).sum()

    losses, gradients = [], []
    for batch in batches:
        losses.append(engine.forward_backward(batch, policy, outputs=("logprobs", "entropy")).loss)
        gradients.append({name: value.double() for name, value in engine.named_gradients()})
        engine.zero_grad()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, value in gradients[0].items():
        assert value.any()
        assert (gradients[1][name] - value).norm() <= 2e-5 * value.norm(), name


@pytest.mark.world(1)
def test_batch_of_the_caller_is_not_modified() -> None:
    with started("fsdp:d1") as engine:
        batch = as_input(global_batch(), "padded")
        before = {key: value.clone() for key, value in batch.items()}
        engine.train_batch(batch, lambda out, b: -(out.logprobs * b["loss_mask"]).sum())
        engine.forward_batch(batch)
        assert batch.keys() == before.keys()
        assert all(torch.equal(batch[key], before[key]) for key in batch)


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_overlong_sequences_are_dropped_or_packed_alone(backend: str) -> None:
    everything = global_batch()
    kept = [sample for sample in everything if len(sample["input_ids"]) <= 20]
    spec = {"max_tokens_per_mb": 20, "overlong": "drop"}
    with (
        started(backend, mb_spec=spec) as engine,
        started(backend, mb_spec=MicroBatchSpec(max_tokens_per_mb=20)) as other,
    ):
        # Separate shards, so that both engines get the same sequences where none is dropped.
        mine_of = [sample for sample in local_batch(engine, everything) if len(sample["input_ids"]) <= 20]
        actual, expected = engine.eval_batch(local_batch(engine, everything), loss), other.eval_batch(mine_of, loss)
        assert actual.metrics["dropped_sequences"] == len(everything) - len(kept)
        assert actual.n_tokens == expected.n_tokens == sum(len(sample["input_ids"]) for sample in kept)
        assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
        restored = engine.forward_batch(local_batch(engine, everything))
        dropped = [
            x
            for x, sample in zip(restored, local_batch(engine, everything), strict=True)
            if len(sample["input_ids"]) > 20
        ]
        assert all(len(x) > 20 and not x.any() for x in dropped)
    with started(backend, mb_spec={"max_tokens_per_mb": 20, "overlong": "alone"}) as alone, started(backend) as full:
        batch = local_batch(alone, everything)
        actual, expected = alone.eval_batch(batch, loss), full.eval_batch(batch, loss)
        assert actual.n_tokens == expected.n_tokens == sum(len(sample["input_ids"]) for sample in everything)
        assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
