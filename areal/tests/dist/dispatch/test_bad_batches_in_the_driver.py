"""A wrong batch is refused in the driver, with the error of an engine alone and before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from areal.api import FinetuneSpec, MicroBatchSpec, TopK, TrainEngine
from areal.dispatch import InProcess, WorkerGroup
from areal.dispatch.executor import Reply, Work
from areal.dispatch.rank_calls import RankLayout
from areal.engine.batch_rules import BatchRules, rules_of
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.tiny import BATCH_VERBS, global_batch, loss, started
from areal.tests.unit.data.bad_batches import BAD_BATCHES
from areal.tests.unit.data.bad_batches import VOCAB as SMALL_VOCAB
from areal.trainer.losses import ppo_objective


class TwoSeats(InProcess):
    """Two ranks whose engine has these rules, and that count what is sent to them after they start."""

    size, in_driver = 2, False

    def __init__(self, rules: BatchRules | None) -> None:
        super().__init__()
        self.rules, self.sent = rules, 0

    def put(self, value: Any, *, keep: bool = False, readers: int = 1) -> Any:
        self.sent += 1
        return super().put(value, keep=keep, readers=readers)

    def ship(self, function: Any, what: str) -> Any:
        self.sent += 1
        return super().ship(function, what)

    def start(self, what: str, work: Work, arguments: Any) -> Future[list[Reply]]:
        replies: Future[list[Reply]] = Future()
        if what == "initialize":
            replies.set_result([Reply(RankLayout(rank, True, self.rules)) for rank in range(2)])
        else:
            self.sent += 1
            replies.set_exception(AssertionError(f"{what} was started on the ranks"))
        return replies


def raised(call: Callable[[], Any]) -> tuple[type, str]:
    """Return the error of a call."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return type(caught.value), str(caught.value)


def assert_refused_alike(engine: TrainEngine, calls: list[Callable[[TrainEngine], Any]]) -> None:
    """Compare the errors of an engine with those of a group that has its rules on two ranks."""
    ranks = TwoSeats(rules_of(engine))
    group = group_on(ranks, engine)
    for call in calls:
        assert raised(lambda call=call: call(group)) == raised(lambda call=call: call(engine))
    assert ranks.sent == 0


def group_on(ranks: TwoSeats, engine: TrainEngine) -> WorkerGroup:
    """Return a group with the configuration of an engine."""
    group = WorkerGroup(engine.config.model_copy(update={"backend": "fsdp:d2"}), ranks)
    group.initialize(FinetuneSpec(total_train_steps=10))
    return group


def with_sample(number: int, **changes: Any) -> list[dict[str, Any]]:
    """Return the global batch, with one sample changed."""
    batch = [dict(sample) for sample in global_batch()]
    batch[number].update(changes)
    return batch


SPECS = sorted({tuple(sorted(spec.items())) for _, _, spec, _ in BAD_BATCHES}, key=str)


@pytest.mark.world(1)
def test_malformed_batches() -> None:
    """Every kind, in every verb and in calls of the caller's function."""
    with started("fsdp:d1", path=model_dir("qwen3", vocab_size=SMALL_VOCAB)) as engine:
        for fields in SPECS:
            engine.config = engine.config.model_copy(update={"mb_spec": MicroBatchSpec(**dict(fields))})
            batches = [batch for _, batch, spec, _ in BAD_BATCHES if tuple(sorted(spec.items())) == fields]
            calls = [lambda it, verb=verb, batch=batch: verb(it, batch) for batch in batches for verb in BATCH_VERBS]
            assert_refused_alike(engine, calls)
        # A function of the caller's gets its shard only of a batch that is fine.
        group = group_on(TwoSeats(rules_of(engine)), engine)
        for run in (group.run, group.map):
            assert raised(lambda run=run: run(len, 7)) == raised(lambda: engine.forward_batch(7))
        # An engine outside of the template tells no rules: the form of a batch is checked, and its values on the ranks.
        ranks = TwoSeats(rules_of(object()))
        assert raised(lambda: group_on(ranks, engine).forward_batch(7)) == raised(lambda: engine.forward_batch(7))
        assert ranks.sent == 0


@pytest.mark.world(1)
def test_values_and_arguments_that_the_model_does_not_have() -> None:
    """The number of a sample is that in the caller's batch."""
    tokens = len(global_batch()[7]["input_ids"])
    outside = with_sample(7, input_ids=torch.full((tokens,), VOCAB))
    targets = with_sample(0, target_ids=torch.full((len(global_batch()[0]["input_ids"]),), VOCAB))
    for number in range(1, 9):
        targets[number]["target_ids"] = targets[number]["input_ids"]
    hot = [{**sample, "temperature": torch.ones(len(sample["input_ids"]))} for sample in global_batch()]
    routed = [
        {**sample, "routed_experts": torch.zeros(len(sample["input_ids"]), 2, 2).long()} for sample in global_batch()
    ]
    objective = ppo_objective()
    good = global_batch()
    calls: list[Callable[[TrainEngine], Any]] = [
        *(
            lambda it, verb=verb, batch=batch: verb(it, batch)
            for batch in (outside, targets, hot, routed, [])
            for verb in BATCH_VERBS
        ),
        lambda it: it.forward_batch(good, outputs=("values",)),
        lambda it: it.forward_batch(good, outputs=("nothing",)),
        lambda it: it.forward_batch(good, outputs=(TopK(VOCAB + 1),)),
        lambda it: it.forward_batch(good, outputs=("routed_experts",)),
        lambda it: it.train_batch(good, loss, outputs=("values",)),
        lambda it: it.eval_batch(good, objective, outputs=("entropy",)),
        lambda it: it.train_batch(good, objective, objective.weight_fn),
        lambda it: it.train_batch(good, objective.loss_fn),
        lambda it: it.forward_backward(good, loss, normalization=-1.0),
        lambda it: it.forward_backward(good, loss, loss_weight=float("nan")),
    ]
    with started("fsdp:d1") as engine:
        assert "sample 7 at position 0" in raised(lambda: engine.train_batch(outside, loss))[1]
        assert_refused_alike(engine, calls)


@pytest.mark.world(1)
def test_recorded_routing_that_cannot_be_replayed() -> None:
    with started("fsdp:d1", path=model_dir("qwen3_moe")) as engine:
        good = recorded_batch(engine)
        engine.forward_batch(good)
        wrong = [
            [{**sample, "routed_experts": change(sample["routed_experts"])} for sample in good]
            for change in (
                lambda experts: experts + 100,
                lambda experts: experts[:, :1],
                lambda experts: experts[..., :1].expand_as(experts),
                lambda experts: experts.float(),
            )
        ]
        assert_refused_alike(engine, [lambda it, batch=batch: it.forward_batch(batch) for batch in wrong])


def recorded_batch(engine: TrainEngine) -> list[dict[str, Any]]:
    """Return the global batch, with the experts that the model chooses."""
    chosen = engine.forward_batch(global_batch(), outputs=("routed_experts",))
    return [{**sample, "routed_experts": experts} for sample, experts in zip(global_batch(), chosen, strict=True)]


@pytest.mark.world(1)
def test_budget_below_the_alignment() -> None:
    """The alignment is that of the engine on the ranks, which the driver's configuration alone does not tell."""
    with started("fsdp:d1", mb_spec=MicroBatchSpec(max_tokens_per_mb=40)) as engine:
        engine._components.token_multiple = 16
        assert "of 16 tokens" in raised(lambda: with_budget(engine, 8).forward_batch(global_batch()))[1]
        assert_refused_alike(engine, [lambda it: it.forward_batch(global_batch())])
        with_budget(engine, 36)
        assert "(48 aligned)" in raised(lambda: engine.forward_batch(global_batch()))[1]
        assert_refused_alike(engine, [lambda it, verb=verb: verb(it, global_batch()) for verb in BATCH_VERBS])


def with_budget(engine: TrainEngine, budget: int) -> TrainEngine:
    engine.config = engine.config.model_copy(update={"mb_spec": MicroBatchSpec(max_tokens_per_mb=budget)})
    return engine
