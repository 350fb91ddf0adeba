"""Adapters on SGLang: ``sync`` sends an engine's adapter alone, and answers have the log-probs of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from areal.api import LoRAConfig, MicroBatchSpec, OptimizerConfig, TrainEngine
from areal.inference.http import HTTPRollout
from areal.inference.protocol import Completion
from areal.tests.grid.models import adapter_dir
from areal.tests.harness.limits import wait_until
from areal.tests.harness.servers.rollout_http import Background
from areal.tests.harness.tiny import global_batch, loss, started
from areal.tests.sglang import server
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.answers import TOLERANCE, endless, prompt, run
from areal.tests.vllm.server import served_model
from areal.trainer.rollout.sequence import Sequence

pytestmark = server.marks

TARGETS = {"list": ("q_proj", "v_proj", "down_proj"), "expression": r".*\.([qkvo]|gate|up)_proj"}


@pytest.fixture(params=TARGETS)
def engine(request: pytest.FixtureRequest) -> Iterator[TrainEngine]:
    """An engine with an adapter that has been trained."""
    lora = LoRAConfig(rank=8, alpha=16, target_modules=TARGETS[request.param])
    settings = {"optimizer": OptimizerConfig(lr=3e-2), "mb_spec": MicroBatchSpec(max_tokens_per_mb=2048)}
    with started("fsdp:d1", path=served_model(), lora=lora, **settings) as one:
        for seed in range(2):
            one.train_batch(global_batch(seed), loss)
        yield one


def error(engine: TrainEngine, given: list[int], answer: Completion) -> float:
    """Return the largest difference between an answer's log-probs and the engine's, in nats."""
    sample = Sequence.single(given, answer, reward=0.0).sample()
    logprobs = engine.forward_batch([sample])[0]
    return float((logprobs - sample["rollout_logprobs"])[sample["loss_mask"] > 0].abs().max())


def test_adapter_is_sent_alone_and_answers(
    connect: Callable[..., HTTPRollout], sglang: SGLangProcess, engine: TrainEngine
) -> None:
    rollout, given = connect(adapter="policy"), prompt(1, 20)
    loads = sglang.asked("/update_weights_from_disk")
    for version in (1, 2):
        engine.train_batch(global_batch(version), loss)
        rollout.sync(engine, version)
        (answer,) = run(rollout.generate(given, endless(16, seed=version)))
        assert answer.versions == (version,) * 16
        assert error(engine, given, answer) <= TOLERANCE
    engine.train_batch(global_batch(), loss)
    assert error(engine, given, answer) > 1e-3, "the judge itself"
    assert sglang.asked("/update_weights_from_disk") == loads


def test_request_under_way_goes_on_with_the_next_adapter(
    connect: Callable[..., HTTPRollout], sglang: SGLangProcess
) -> None:
    lora = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "v_proj"))
    first, second = (adapter_dir(served_model(), lora, seed=seed) for seed in (1, 2))
    rollout = connect(adapter="policy")
    rollout.load(first, 1)
    background = Background(rollout.generate(prompt(1), endless(480, seed=1)))
    wait_until(lambda: sglang.metric("sglang:num_running_reqs") > 0)
    rollout.load(second, 2)
    (answer,) = background.result()
    assert set(answer.versions) == {1, 2}
    assert len(answer.tokens) == 480


def test_adapter_of_a_larger_rank_is_refused_in_the_servers_words(connect: Callable[..., HTTPRollout]) -> None:
    large = adapter_dir(served_model(), LoRAConfig(rank=16, alpha=16, target_modules=("q_proj", "v_proj")))
    with pytest.raises((RuntimeError, ValueError), match="max-lora-rank"):
        connect(adapter="policy").load(large, 1)
