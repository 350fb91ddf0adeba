"""Samples that were put: their tensors travel once, for all models, epochs and mini-batches, and the ranks receive the same shards."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.api import MicroBatchSpec, StepOutput, TrainEngine
from areal.dispatch import InProcess, WorkerGroup
from areal.dispatch.rank_calls import RankLayout
from areal.dispatch.ray.stored import by_reference
from areal.dispatch.stored_samples import PIECE_BYTES, StoredSample
from areal.tests.dist.dispatch.results import same
from areal.tests.harness.tiny import config
from areal.tests.unit.dispatch import simulated as module
from areal.tests.unit.dispatch.simulated import SimulatedRay, WorkingRank, simulated, simulated_ray
from areal.trainer.estimators import CriticBased
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer
from areal.trainer.rollout.plan import Plan
from areal.trainer.updates import Updates

__all__ = ["simulated_ray"]

Sample = dict[str, Any]


class RecordingEngine:
    """An engine that keeps the batches that it gets.

    Attributes:
        seen: batches, in order.
    """

    def __init__(self, dp_rank: int, *, is_main: bool) -> None:
        self.dp_rank, self.is_main = dp_rank, is_main
        self.seen: list[Any] = []

    def forward_batch(self, batch: Any, *, outputs: tuple[str, ...] = ("logprobs",)) -> Any:
        self.seen.append(batch)
        by_name = {name: [sample["input_ids"] * -1e-3 for sample in batch] for name in outputs}
        return by_name if len(outputs) > 1 else by_name[outputs[0]]

    def train_batch(self, batch: Any, loss_fn: Any, **_: Any) -> StepOutput:
        self.seen.append(batch)
        return StepOutput(0.0, {"loss": 0.0})

    def destroy(self) -> None:
        pass


@contextmanager
def recording_group(its: SimulatedRay, dp: int = 2, tp: int = 1) -> Iterator[tuple[WorkerGroup, list[RecordingEngine]]]:
    """Yield a group of ``dp`` data-parallel coordinates of ``tp`` ranks, and the engines of all ranks."""
    size = dp * tp
    ranks = [WorkingRank(rank, size, its) for rank in range(size)]
    engines = [RecordingEngine(rank // tp, is_main=rank % tp == 0) for rank in range(size)]
    for rank, engine in zip(ranks, engines, strict=True):
        rank.objects.by_name["engine"] = engine
    with simulated(ranks) as workers:
        spec = MicroBatchSpec(max_tokens_per_mb=2**17)
        group = WorkerGroup(config(f"fsdp:d{dp}t{tp}", path="model", mb_spec=spec), workers)
        group._calls.take_rank_layouts([RankLayout(engine.dp_rank, engine.is_main, None) for engine in engines])
        yield group, engines


def samples_of(lengths: list[int]) -> list[Sample]:
    """Return samples as a rollout makes them, in groups of four."""
    return [
        {
            "input_ids": torch.arange(n) + i,
            "loss_mask": torch.ones(n),
            "output_mask": torch.ones(n, dtype=torch.bool),
            "rollout_logprobs": torch.full((n,), -0.5),
            "versions": torch.zeros(n, dtype=torch.int64),
            "rewards": torch.tensor(float(i % 3)),
            "group_ids": torch.tensor(i // 4),
            "truncated": torch.tensor(False),
        }
        for i, n in enumerate(lengths)
    ]


def nbytes(samples: list[Sample]) -> int:
    return sum(value.nbytes for sample in samples for value in sample.values())


def bytes_of(its: SimulatedRay) -> int:
    """Return the bytes through the driver so far, in both directions."""
    return its.stored + its.sent + its.returned


# ---- a step of PPO


def step_of_ppo(policy: TrainEngine, critic: TrainEngine, samples: list[Sample]) -> list[Sample]:
    """Score samples and train on them in two epochs of two mini-batches, as the trainer does. Returns the scored samples."""
    plan = Plan(groups=len(samples) // 4, group_size=4)
    runner: Any = SimpleNamespace(plan=plan, plays=True, place=(0, 1), rank=0, size=1, at_close=lambda close: None)
    trainer = PPOTrainer(
        policy,
        ppo_objective(),
        runner,
        lambda source, version: None,
        estimator=CriticBased(),
        critic=Critic(critic, value_objective()),
        updates=Updates(epochs=2, minibatches=2),
    )
    groups: Any = [SimpleNamespace(index=number, position=number) for number in range(plan.groups)]
    scored = trainer.score(samples)
    for minibatch in trainer._minibatches(groups, scored):
        trainer._update(minibatch)
    return scored


def test_batch_and_scores_of_a_ppo_step_travel_once(
    simulated_ray: SimulatedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two models on their own processes and two epochs. Each rank receives what it receives without."""
    lengths, counts, seen = [200 + 7 * i for i in range(64)], {}, {}
    for put in (True, False):
        with recording_group(simulated_ray) as (policy, engines), recording_group(simulated_ray) as (critic, others):
            if not put:
                monkeypatch.setattr(WorkerGroup, "put", TrainEngine.put)
            before = bytes_of(simulated_ray)
            scored = step_of_ppo(policy, critic, samples_of(lengths))
            counts[put] = (bytes_of(simulated_ray) - before) / nbytes(scored)
            seen[put] = [engine.seen for engine in (*engines, *others)]
    assert counts[True] <= 1.1
    assert counts[False] >= 5
    assert same(seen[True], seen[False])
    # The order of keys, too.
    first, second = ([[list(sample) for batch in each for sample in batch] for each in seen[put]] for put in counts)
    assert first == second


@pytest.mark.parametrize(("dp", "tp"), [(16, 1), (2, 8)])
def test_ranks_add_few_bytes_to_those_of_the_batch(simulated_ray: SimulatedRay, dp: int, tp: int) -> None:
    """At most 2,000 for each rank and call, both ways."""
    groups = (recording_group(simulated_ray, dp, tp) for _ in range(2))
    with next(groups) as (policy, engines), next(groups) as (critic, _):
        before = bytes_of(simulated_ray)
        scored = step_of_ppo(policy, critic, samples_of([200 + 7 * i for i in range(64)]))
        added = bytes_of(simulated_ray) - before - 1.03 * nbytes(scored)
    calls = 2 * len(engines[0].seen)
    assert added <= 2000 * dp * tp * calls
    assert all(same(engine.seen, engines[rank // tp * tp].seen) for rank, engine in enumerate(engines))


def test_shard_of_many_pieces_is_stored_once_for_its_ranks(simulated_ray: SimulatedRay) -> None:
    """One of few pieces travels in the calls, and so does one that a single rank reads."""
    for tp, many in ((8, True), (1, False)):
        with recording_group(simulated_ray, 2, tp) as (group, engines):
            # 32 pieces for each coordinate, and a value that is not in the store.
            meta = {"step": 3}
            samples = [group.put([sample])[0] | {"meta": meta} for sample in samples_of([10] * 64)]
            stored, sent = simulated_ray.stored, simulated_ray.sent
            group.forward_batch(samples)
            assert (simulated_ray.stored > stored) == many
            assert not many or simulated_ray.sent - sent < 1000 * 2 * tp
            seen = [sample for engine in (engines[0], engines[tp]) for sample in engine.seen[0]]
            assert same(sorted(seen, key=lambda x: int(x["input_ids"][0])), [dict(sample) for sample in samples])
            assert all(same(engine.seen, engines[rank // tp * tp].seen) for rank, engine in enumerate(engines))
            stored = simulated_ray.stored
            group.forward_batch(samples[:8])
            assert simulated_ray.stored == stored


@pytest.mark.parametrize(
    ("kib", "readers", "references", "expected"),
    [
        (63, 1, 0, False),
        (65, 1, 0, True),
        (63, 2, 0, False),
        (63, 8, 0, True),
        (48, 8, 0, False),
        (31, 1024, 0, False),
        (33, 1024, 0, True),
        (1, 8, 12, False),
        (1, 8, 24, True),
        (1, 1024, 6, False),
        (1, 1, 1000, False),
    ],
)
def test_values_are_stored_if_that_costs_the_driver_less(
    kib: int, readers: int, references: int, expected: bool
) -> None:
    assert by_reference(kib * 2**10, readers=readers, references=references) is expected


# ---- what is put


def put_bytes(its: SimulatedRay, group: WorkerGroup, samples: list[Sample]) -> tuple[list[Sample], int]:
    """Put samples. Returns them, and the bytes that this has stored."""
    before = its.stored
    return group.put(samples), its.stored - before


def test_only_new_and_changed_tensors_are_put(simulated_ray: SimulatedRay) -> None:
    samples = samples_of([1000] * 8)
    with recording_group(simulated_ray) as (group, engines):
        stored, sent = put_bytes(simulated_ray, group, samples)
        assert sent >= nbytes(samples)
        assert same(stored, samples)
        # Mini-batches, repeated and reordered samples, and copies.
        assert put_bytes(simulated_ray, group, stored[::-2])[1] == 0
        assert put_bytes(simulated_ray, group, [stored[3] | {"scores": stored[3]["rewards"]}, stored[3]])[1] == 0
        # Further keys, and other values of a key.
        added = [sample | {"advantages": torch.ones(1000), "loss_mask": torch.zeros(1000)} for sample in stored]
        added, sent = put_bytes(simulated_ray, group, added)
        assert 8 * 8000 <= sent < 8 * 8000 + 4096
        # Changes in place.
        added[5]["advantages"] *= 2
        assert 4000 <= put_bytes(simulated_ray, group, added)[1] < 4000 + 2048
        group.forward_batch(added)
        seen = sorted((sample for engine in engines for sample in engine.seen[0]), key=lambda x: int(x["input_ids"][0]))
        assert same(seen, [dict(sample) for sample in added])


def test_tensors_of_the_inference_mode_travel_with_each_call(simulated_ray: SimulatedRay) -> None:
    """Their changes in place are not counted."""
    with recording_group(simulated_ray) as (group, engines):
        with torch.inference_mode():
            stored = group.put(samples_of([100] * 4))
            stored[0]["loss_mask"].zero_()
        group.forward_batch(group.put(stored))
        assert same(engines[0].seen[0], [dict(stored[i]) for i in (0, 2)])


def test_tensors_that_are_not_in_the_store_travel_with_the_call(simulated_ray: SimulatedRay) -> None:
    """So do values that are no tensors, and samples that were never put."""
    with recording_group(simulated_ray) as (group, engines):
        meta = {"step": 3}
        samples = [sample | {"meta": meta} for sample in samples_of([100] * 8)]
        stored = group.put(samples[:6])
        group.put(stored)[0]["loss_mask"].zero_()
        mixed = [*(sample | {"advantages": torch.ones(100)} for sample in stored), *samples[6:]]
        mixed[6:] = [sample | {"advantages": torch.ones(100)} for sample in mixed[6:]]
        group.forward_batch(mixed)
        meta["step"] = 4
        group.forward_batch(mixed)
        seen = [
            sorted((sample for engine in engines for sample in engine.seen[call]), key=lambda x: int(x["input_ids"][0]))
            for call in (0, 1)
        ]
        assert same(seen[1], [dict(sample) for sample in mixed])
        assert {sample["meta"]["step"] for sample in seen[0]} == {3}


def test_results_are_read_where_they_are_until_a_process_is_lost(simulated_ray: SimulatedRay) -> None:
    """Also by ranks of another group, and one of several outputs. Then they are sent."""
    with recording_group(simulated_ray) as (policy, engines), recording_group(simulated_ray) as (critic, others):
        samples = policy.put(samples_of([1000, 2000, 3000, 500]))
        logprobs = policy.forward_batch(samples)
        values = critic.forward_batch(samples, outputs=("logprobs", "values"))["values"]
        scored = [
            sample | {"old_logprobs": a, "old_values": b}
            for sample, a, b in zip(samples, logprobs, values, strict=True)
        ]
        before = simulated_ray.stored + simulated_ray.sent
        for group in (policy, critic):
            assert put_bytes(simulated_ray, group, scored)[1] == 0
            group.forward_batch(scored)
        assert simulated_ray.stored + simulated_ray.sent - before < 12_000
        assert same([engine.seen[-1] for engine in engines], [engine.seen[-1] for engine in others])
        assert "old_values" in engines[0].seen[-1][0]

        critic._executor.generation = 1
        scored, sent = put_bytes(simulated_ray, policy, scored)
        assert nbytes([{"": value} for value in values]) <= sent < nbytes([{"": value} for value in values]) + 2048
        before = engines[0].seen[-1]
        policy.forward_batch(scored)
        assert same(engines[0].seen[-1], before)


def test_store_is_freed_with_the_samples(simulated_ray: SimulatedRay) -> None:
    """And results with their tensors."""

    def objects() -> int:
        gc.collect()
        return len(module._refs)

    with recording_group(simulated_ray) as (group, _):
        before = objects()
        stored = group.put(samples_of([PIECE_BYTES // 64] * 8))
        assert objects() - before == 3
        del stored
        assert objects() == before
        # Of results that the driver does not have any more, a bounded number is left.
        stored = group.put(samples_of([10] * 4))
        for _ in range(40):
            group.forward_batch(stored)
        assert objects() - before < 50
        assert all(len(sample.places) < 20 for sample in stored if isinstance(sample, StoredSample))
        del stored
        assert objects() == before


def test_stored_samples_are_dicts_elsewhere(simulated_ray: SimulatedRay) -> None:
    """In other processes, and for executors that cannot read the store. A rank in the driver reads the samples themselves."""
    samples = samples_of([10] * 4)
    with recording_group(simulated_ray) as (group, engines):
        stored = group.put(samples)
        copied = pickle.loads(pickle.dumps(stored))
        assert {type(sample) for sample in copied} == {dict}
        assert same(copied, samples)

        class Others(type(group._executor)):  # type: ignore[misc]
            """Ranks with a store of their own."""

        group._executor.__class__ = Others
        group.forward_batch(stored)
        assert same(engines[0].seen[-1], [samples[i] for i in (0, 2)])
        assert put_bytes(simulated_ray, group, stored)[1] > 0
    alone = WorkerGroup(config("fsdp:d1", path="model"), InProcess())
    assert alone.put(samples) is samples


@pytest.mark.parametrize("wrong", [{"input_ids": torch.ones(2, 3)}, [torch.ones(3)]], ids=["padded", "no dict"])
def test_other_batches_are_refused(simulated_ray: SimulatedRay, wrong: Any) -> None:
    groups = WorkerGroup(config("fsdp:d1", path="model"), InProcess())
    with recording_group(simulated_ray) as (group, _):
        for each in (group, groups):
            with pytest.raises(ValueError, match=r"^samples is a (dict|list with a Tensor): pass a list with one dict"):
                each.put(wrong)
