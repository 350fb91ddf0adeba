"""Migration guide (docs/coming-from.md): each recommended call gives the value and the gradient of the other library's formula.

Other libraries pad prompts on the left and responses on the right, and compute the loss on ``[n, R]``. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import FinetuneSpec, MicroBatchSpec, OptimizerConfig, TrainEngine, TrainEngineConfig
from areal.engine.registry import create_engine
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import VOCAB, model_dir
from areal.trainer.losses import (
    Aggregation,
    FixedLength,
    PPOClip,
    SequenceMean,
    SequenceMeanOfSums,
    TokenMean,
    mean_loss,
    policy_objective,
)
from areal.utils.data import from_hf_labels, from_left_padded, from_prompt_response, to_responses

N, P, R = 6, 5, 7
PROMPTS, RESPONSES = (3, 5, 1, 4, 2, 5), (7, 2, 5, 1, 6, 3)


class There:
    """Batch in the form of another library."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(3, VOCAB, (N, P), generator=generator)
        self.prompt_mask = torch.stack([torch.arange(P) >= P - length for length in PROMPTS]).long()
        self.responses = torch.randint(3, VOCAB, (N, R), generator=generator)
        self.response_mask = torch.stack([torch.arange(R) < length for length in RESPONSES]).long()
        self.advantages = torch.randn(N, R, generator=generator, dtype=torch.float64)
        self.old = -4.7 + 0.3 * torch.randn(N, R, generator=generator, dtype=torch.float64)

    def logprobs(self, model: Any) -> Tensor:
        """Compute log-probs of the response tokens ``[n, R]``, one sequence at a time; zeros at padding."""
        rows = []
        for prompt, response, length, answered in zip(self.prompts, self.responses, PROMPTS, RESPONSES, strict=True):
            ids = torch.cat([prompt[P - length :], response[:answered]])
            scores = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            result = scores[length - 1 : -1].gather(1, ids[length:, None]).squeeze(1)
            rows.append(torch.cat([result, result.new_zeros(R - answered)]))
        return torch.stack(rows)

    def clipped(self, logprobs: Tensor) -> Tensor:
        """Compute PPO's clipped loss per token ``[n, R]``."""
        ratio = torch.exp(logprobs - self.old)
        return -torch.minimum(ratio * self.advantages, ratio.clamp(0.8, 1.2) * self.advantages)

    def batch(self) -> dict[str, Tensor]:
        """Return the same batch in this library's form."""
        return from_prompt_response(
            self.prompts,
            self.prompt_mask,
            self.responses,
            self.response_mask,
            loss_mask=self.response_mask.double(),
            values={"advantages": self.advantages, "old_logprobs": self.old},
        )


Formula = Callable[[Tensor, Tensor], Tensor]
MODES: dict[str, tuple[Formula, Aggregation]] = {
    "verl token-mean": (lambda loss, mask: (loss * mask).sum() / mask.sum(), TokenMean()),
    "verl seq-mean-token-sum": (lambda loss, mask: (loss * mask).sum(-1).mean(), SequenceMeanOfSums()),
    "verl seq-mean-token-mean": (lambda loss, mask: ((loss * mask).sum(-1) / mask.sum(-1)).mean(), SequenceMean()),
    "trl grpo": (lambda loss, mask: ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean(), SequenceMean()),
    "trl bnpo, dapo": (lambda loss, mask: (loss * mask).sum() / mask.sum().clamp(min=1), TokenMean()),
    "trl dr_grpo": (lambda loss, mask: (loss * mask).sum() / (N * R), FixedLength(R)),
    "areal": (lambda loss, mask: torch.where(mask > 0, loss, 0).sum() / mask.count_nonzero(), TokenMean()),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[TrainEngine]:
    with float64_everywhere():
        config = TrainEngineConfig(
            path=model_dir("qwen3"),
            dtype="float64",
            master_dtype="float64",
            grad_reduce_dtype="float64",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=24),
            optimizer=OptimizerConfig(lr=0.0),
        )
        with create_engine(config) as made:
            made.initialize(FinetuneSpec(total_train_steps=1))
            yield made


@pytest.fixture(scope="module")
def plain(engine: TrainEngine) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float64).eval()


def assert_equal(engine: TrainEngine, loss: float, model: Any, expected: Tensor) -> None:
    """Compare value and gradient, then discard both gradients."""
    model.zero_grad()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    actual = dict(engine.named_gradients())
    assert actual.keys() == wanted.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-11)
    engine.zero_grad()


@pytest.mark.parametrize("name", MODES)
def test_migration_aggregation_modes(engine: TrainEngine, plain: Any, name: str) -> None:
    formula, aggregation = MODES[name]
    there = There()
    objective = policy_objective(PPOClip(0.2, 0.2), aggregation)
    done = engine.forward_backward(there.batch(), objective.loss_fn, objective.weight_fn)
    expected = formula(there.clipped(there.logprobs(plain)), there.response_mask)
    assert_equal(engine, done.loss, plain, expected)
    assert done.n_mbs > 1


def test_migration_constant_divisor(engine: TrainEngine, plain: Any) -> None:
    """Check verl's ``seq-mean-token-sum-norm``: token sums divided by the longest response, not by the number of sequences."""
    there = There()
    objective = policy_objective(PPOClip(0.2, 0.2), SequenceMeanOfSums())
    done = engine.forward_backward(there.batch(), objective.loss_fn, normalization=float(R))
    expected = (there.clipped(there.logprobs(plain)) * there.response_mask).sum() / there.response_mask.shape[-1]
    assert_equal(engine, done.loss, plain, expected)


def test_migration_mean_loss(engine: TrainEngine, plain: Any) -> None:
    there = There()

    def theirs(outputs: Any, batch: Any) -> Tensor:
        mask = batch["loss_mask"]
        return -(outputs.logprobs * batch["advantages"] * mask).sum() / mask.sum()

    objective = mean_loss(theirs)
    done = engine.forward_backward(there.batch(), objective.loss_fn, objective.weight_fn)
    mask = there.response_mask
    expected = -(there.logprobs(plain) * there.advantages * mask).sum() / mask.sum()
    assert_equal(engine, done.loss, plain, expected)


def test_migration_response_logprobs(engine: TrainEngine, plain: Any) -> None:
    there = There()
    actual = to_responses(engine.forward_batch(there.batch()), there.prompt_mask, there.response_mask)
    with torch.no_grad():
        expected = there.logprobs(plain)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_migration_left_padding_and_labels(engine: TrainEngine, plain: Any) -> None:
    """Check the loss of a left-padded Hugging Face batch with ``labels``."""
    there = There()
    ids = torch.cat([there.prompts, there.responses], 1)
    mask = torch.cat([there.prompt_mask, there.response_mask], 1)
    labels = torch.where(torch.cat([torch.zeros_like(there.prompt_mask), there.response_mask], 1) > 0, ids, -100)
    batch = from_hf_labels(from_left_padded({"input_ids": ids, "attention_mask": mask, "labels": labels}))
    done = engine.forward_backward(batch, lambda out, mb: -(out.logprobs * mb["loss_mask"]).sum())
    expected = -(there.logprobs(plain) * there.response_mask).sum() / there.response_mask.sum()
    assert_equal(engine, done.loss, plain, expected)
