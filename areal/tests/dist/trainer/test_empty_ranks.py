"""Trainers with data-parallel ranks without samples: each step is that of a layout on which no rank is empty."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import MicroBatchSpec, NamedTensor, OptimizerConfig, StepOutput, TrainEngine
from areal.inference.protocol import Completion, RolloutClient
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness import tiny
from areal.tests.harness.rl import EPISODE, SAMPLING, Curve, Played, Prompts, played, reward
from areal.tests.harness.tiny import gradients_of, same_bits, weights_of
from areal.tests.harness.world import world
from areal.trainer.estimators import CriticBased, Estimator, GroupRelative
from areal.trainer.losses import grpo_objective, ppo_objective, sft_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer, Sync
from areal.trainer.preference import Pair, dpo_trainer, reward_trainer
from areal.trainer.rollout.episodes import Episode, SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.sequence import Sequence
from areal.trainer.supervised import SupervisedTrainer, sft_trainer
from areal.trainer.updates import Updates
from areal.utils.data import sharded_loader

OPTIMIZER = OptimizerConfig(lr=1e-3, gradient_clipping=1.0, eps=1e-6)
PAIRS = MicroBatchSpec(max_tokens_per_mb=96, granularity=2)
INDEX = {tuple(Prompts()[index]): index for index in range(len(Prompts()))}
"""Prompt -> its index, which is that of its group if the plan does not shuffle. Data-parallel rank 1 of 2 plays the odd ones."""


def started(backend: str, **fields: Any) -> Any:
    return tiny.started(backend, **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **fields})


def is_odd(item: list[int]) -> bool:
    return INDEX[tuple(item)] % 2 == 1


# ---- rollouts of which a rank has nothing to train on


class FailsOnOddItems:
    """Episode whose sandbox is down for the groups of one rank."""

    async def run(self, client: RolloutClient, item: list[int]) -> list[Sequence]:
        """Raise for odd items."""
        if is_odd(item):
            raise RuntimeError("the sandbox is down")
        return await EPISODE.run(client, item)


def flat_if_odd(item: list[int], answer: Completion) -> float:
    return 0.5 if is_odd(item) else reward(item, answer)


FLAT = SingleTurn(lambda item: item, flat_if_odd, SAMPLING)
ALL_FLAT = SingleTurn(lambda item: item, lambda item, answer: 0.5, SAMPLING)
LONG = SingleTurn(lambda item: item * 4 if is_odd(item) else item, reward, SAMPLING)


@dataclass(frozen=True)
class Row:
    """One situation in which a data-parallel rank of two is without samples, in all steps or in some mini-batches.

    Attributes:
        updates: fields of ``Updates``.
        groups: groups of a batch.
        models: models in addition to the policy: ``reference``, ``critic``.
        max_failed_share: limit of the plan.
    """

    episode: Episode = EPISODE
    updates: dict[str, Any] = field(default_factory=dict)
    groups: int = 4
    models: tuple[str, ...] = ()
    max_failed_share: float | None = 0.1


SKIP = {"skip_flat": True}
KEEP_LOGPROBS = {"recompute_logprobs": False}
ROWS = {
    "flat": Row(FLAT, SKIP),
    "flat-rollout's log-probs": Row(FLAT, SKIP | KEEP_LOGPROBS),
    "flat-reference": Row(FLAT, SKIP | KEEP_LOGPROBS, models=("reference",)),
    "flat-all models": Row(FLAT, SKIP | {"minibatches": 2}, models=("reference", "critic")),
    "four mini-batches": Row(updates={"minibatches": 4, "epochs": 2}),
    "one group": Row(groups=1, models=("reference",)),
    "failed": Row(FailsOnOddItems(), max_failed_share=None),
    "too long": Row(LONG, {"max_tokens": 13}, models=("critic",)),
}

NO_SAMPLES = {
    "recomputed": Row(ALL_FLAT, SKIP, models=("critic",)),
    "rollout's log-probs": Row(ALL_FLAT, SKIP | KEEP_LOGPROBS | {"minibatches": 2}, models=("reference",)),
}
"""Situations in which no rank has a sample."""


def estimator(row: Row) -> Estimator:
    """Return an estimator that reads all models of the row, and normalises over ranks if there is a critic."""
    kl = 0.02 if "reference" in row.models else 0.0
    return CriticBased(kl_coef=kl) if "critic" in row.models else GroupRelative()


def curve_of(
    backend: str, row: Row, steps: int = 2, sync: Callable[[Played], Sync] = lambda rollout: rollout.sync
) -> tuple[Curve, dict[str, Tensor], list[int]]:
    """Train on a layout. Returns the scalars of each step, the weights, and this rank's number of samples in each update."""
    curve, value, sizes = Curve(), None, list[int]()
    plan = Plan(row.groups, group_size=3, seed=11, shuffle=False, max_failed_share=row.max_failed_share)
    with ExitStack() as stack:
        engine = stack.enter_context(started(backend))
        reference = stack.enter_context(started(backend, optimizer=None)) if "reference" in row.models else None
        if "critic" in row.models:
            value = Critic(stack.enter_context(started(backend, value_head=True)), value_objective())
        rollout = stack.enter_context(played(engine, plan, row.episode))
        train_batch = engine.train_batch

        def counting(batch: list[Any], *args: Any, **options: Any) -> StepOutput:
            sizes.append(len(batch))
            return train_batch(batch, *args, **options)

        engine.train_batch = counting  # type: ignore[method-assign]
        objective = ppo_objective() if value else grpo_objective(kl_coef=0.04 if reference else 0.0)
        trainer = PPOTrainer(
            engine,
            objective,
            rollout.runner,
            sync(rollout),
            estimator=estimator(row),
            reference=reference,
            critic=value,
            updates=Updates(**row.updates),
            tracker=curve,
        )
        trainer.train(steps)
        assert (trainer.step, engine.version) == (steps, steps)
        return curve, weights_of(engine), sizes


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("row", "backend"),
    [*((row, "fsdp:d2") for row in ROWS), ("flat-all models", "megatron:d2"), ("four mini-batches", "fsdp:r2")],
)
def test_steps_with_an_empty_rank_equal_those_without(backend: str, row: str) -> None:
    """Context-parallel ranks have the same samples, so that none of them is empty."""
    (with_groups, _, full), (actual, _, sizes) = curve_of("fsdp:c2", ROWS[row]), curve_of(backend, ROWS[row])
    # Some rank is empty in some update; together, the ranks have all samples.
    everyones: list[Any] = [None] * world().size
    dist.all_gather_object(everyones, sizes)
    assert any(0 in each for each in everyones)
    assert [sum(each) for each in zip(*everyones, strict=True)] == full
    assert all(full)
    for step, wanted in zip(actual.steps, with_groups.steps, strict=True):
        assert step.keys() == wanted.keys() > {"rollout/reward", "actor/loss", "actor/grad_norm", "actor/weight"}
        # Times differ, and so does the number of micro-batches.
        names = [name for name in wanted if not re.match(r"time/|.*/seconds|.*/n_mbs", name)]
        assert {name: step[name] for name in names} == pytest.approx(
            {name: wanted[name] for name in names}, rel=2e-3, abs=1e-4
        )
    assert max(actual["actor/grad_norm"]) > 0.0


@pytest.mark.world(1, 2)
def test_too_many_failed_episodes_end_the_run_on_every_rank() -> None:
    """Also on a rank whose own episodes did not fail, with the file and the line of the user's function."""
    message = r"(?s)6 of 12 episodes of this batch failed.*Plan.max_failed_share = 0.1.*in run\n.*RuntimeError: the sandbox is down"
    with pytest.raises(RuntimeError, match=message) as raised:
        curve_of(f"fsdp:d{world().size}", Row(FailsOnOddItems()))
    assert f'File "{__file__}", line' in str(raised.value)


@pytest.mark.world(1, 2)
def test_run_ends_after_steps_in_a_row_without_a_trained_token() -> None:
    with pytest.raises(
        RuntimeError, match=r"max_empty_steps = 2 steps in a row trained on no token: all groups are flat"
    ):
        curve_of(f"fsdp:d{world().size}", Row(ALL_FLAT, SKIP | {"max_empty_steps": 2}), steps=3)


@pytest.mark.world(1, 2)
def test_sync_that_sends_nothing_ends_the_run() -> None:
    with pytest.raises(
        RuntimeError, match=r"12 of 12 sequences .* Plan.max_staleness = 0 updates before version 1: sync= did not"
    ):
        curve_of(f"fsdp:d{world().size}", Row(), sync=lambda rollout: lambda engine, version: None)


@pytest.mark.world(1, 2)
def test_sync_that_only_names_the_version_ends_the_run() -> None:
    def of_first_weights(rollout: Played) -> Sync:
        first: list[NamedTensor] = []

        def sync(engine: TrainEngine, version: int) -> None:
            newest = [NamedTensor(name, tensor.clone()) for name, tensor in engine.named_tensors()]
            first.extend(() if first else newest)
            rollout.rollout.update(iter(first), version)

        return sync

    with pytest.raises(RuntimeError, match=r"has grown in \d steps in a row.*Check that sync= sends them"):
        curve_of(f"fsdp:d{world().size}", Row(), steps=12, sync=of_first_weights)


@pytest.mark.world(1, 2)
@pytest.mark.parametrize("row", NO_SAMPLES)
def test_ppo_skips_a_batch_without_any_sample(row: str) -> None:
    curve, weights, sizes = curve_of(f"fsdp:d{world().size}", NO_SAMPLES[row], steps=1)
    assert (curve["actor/empty"], sizes) == ([1.0], [])
    assert curve["rollout/flat_groups"] == [1.0]
    assert not [name for name in curve.steps[0] if "logprob_" in name or name in ("actor/loss", "critic/loss")]
    with started(f"fsdp:d{world().size}") as fresh:
        assert same_bits(weights, weights_of(fresh))


# ---- data sets


class Texts:
    """Nine short texts: an odd number, so that after eight of them a single one is left."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(3, VOCAB, (5 + index,), generator=generator)}


class Preferences(Texts):
    """Nine pairs of answers."""

    def __getitem__(self, index: int) -> Pair:
        ids = super().__getitem__(index)["input_ids"].tolist()
        return Pair(ids[:3], [*ids[3:], 7], [*ids[4:], 8])


def trainer_of(kind: str, engine: TrainEngine, reference: TrainEngine | None) -> SupervisedTrainer:
    """Return a trainer that resumes where one sample of the epoch is left."""
    data = Texts() if kind == "sft" else Preferences()
    loader = sharded_loader(data, batch_size=4, dp_rank=engine.dp_rank, dp_size=engine.dp_size, seed=3)
    loader.load_state_dict({"seed": 3, "epoch": 0, "cursor": 8})
    if kind == "sft":
        return sft_trainer(engine, loader)
    if kind == "reward":
        return reward_trainer(engine, loader)
    assert reference is not None
    return dpo_trainer(engine, reference, loader)


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_last_sample_of_a_resumed_epoch_trains_one_rank(kind: str) -> None:
    """Fewer samples are left than there are ranks: one rank gets an empty list."""
    losses = {}
    for backend in ("fsdp:c2", "fsdp:d2"):
        fields = {} if kind == "sft" else {"mb_spec": PAIRS, "value_head": kind == "reward"}
        with ExitStack() as stack:
            engine = stack.enter_context(started(backend, **fields))
            reference = stack.enter_context(started(backend, optimizer=None, **fields)) if kind == "dpo" else None
            seen: list[tuple[float, float, int]] = []
            trainer = trainer_of(kind, engine, reference)
            trainer.train(
                2, after_step=lambda step, seen=seen: seen.append((step.loss, step.grad_norm or 0.0, step.n_tokens))
            )
            losses[backend] = seen
    assert losses["fsdp:d2"] == [pytest.approx(step, rel=1e-4) for step in losses["fsdp:c2"]]
    assert losses["fsdp:d2"][0][1] > 0.0


@pytest.mark.world(1, 2)
def test_empty_global_batch_of_a_supervised_trainer_raises_on_all_ranks() -> None:
    """Its ``prepare`` leaves nothing. No step is counted, and the engine can be used."""
    with started(f"fsdp:d{world().size}") as engine:
        loader = sharded_loader(Texts(), batch_size=4, dp_rank=engine.dp_rank, dp_size=engine.dp_size)
        trainer = SupervisedTrainer(engine, sft_objective(), loader, prepare=lambda samples: [])
        with pytest.raises(ValueError, match="empty batch: no rank has a sample"):
            trainer.train(1)
        with pytest.raises(ValueError, match="empty batch: no rank has a sample"):
            trainer.evaluate([])
        assert trainer.step == 0
        # One rank alone may be without samples, in an evaluation too.
        texts = [] if engine.dp_rank == 1 else [Texts()[index] for index in range(3)]
        evaluated = trainer.evaluate(texts).loss
        objective = sft_objective()
        step = engine.forward_backward(texts, objective.loss_fn, objective.weight_fn)
        assert step.loss == pytest.approx(evaluated, rel=1e-6)
        assert any(gradient.any() for gradient in gradients_of(engine).values())
