"""Answers sampled at another temperature than 1: the trainer's log-probs are those of the distribution that was sampled."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal.api import OptimizerConfig, TrainEngine
from areal.inference.http import VLLM, Dialect, HTTPRollout, SGLang
from areal.inference.protocol import Sampling
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import SAMPLING, Curve, Prompts, played, reward
from areal.tests.harness.servers.rollout_http import Process
from areal.tests.harness.tiny import started
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import grpo_objective
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner
from areal.trainer.updates import Updates

PLAN = Plan(groups=2, group_size=3, seed=1)


def policy(backend: str = "fsdp:d1", **changes: Any) -> Any:
    return started(backend, **{"path": model_dir("qwen3"), "optimizer": OptimizerConfig(lr=1e-3), **changes})


def episode(**changes: Any) -> SingleTurn:
    return SingleTurn(lambda item: item, reward, dataclasses.replace(SAMPLING, **changes))


@contextmanager
def on_server(url: str, dialect: Dialect, folder: Path, sampling: Sampling) -> Iterator[tuple[Runner, Any]]:
    """Yield a runner over a server, and the function that sends weights to it."""
    with ExitStack() as stack:
        rollout = stack.enter_context(HTTPRollout(url, dialect, folder=folder, model=model_dir("qwen3"), deadline=60))
        runner = Runner(rollout, SingleTurn(lambda item: item, reward, sampling), Prompts(), PLAN)
        stack.callback(runner.close)
        yield runner, lambda source, version: rollout.update(source.named_tensors(), version)


def one_step(engine: TrainEngine, runner: Runner, sync: Any, **options: Any) -> dict[str, float]:
    curve = Curve()
    grpo_trainer(engine, runner, sync, tracker=curve, **options).train(1)
    return curve.steps[0]


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", pytest.param("megatron:d1")])
def test_log_probs_are_those_of_the_rollouts_temperature(backend: str) -> None:
    """Old log-probs, the forward of the update, and the reference agree with the rollout; no engine has a temperature."""
    objective = grpo_objective(kl_coef=0.1)
    for recompute in (True, False):
        with (
            policy(backend) as engine,
            policy(backend, optimizer=None) as reference,
            played(engine, PLAN, episode(temperature=0.5)) as rollout,
        ):
            step = one_step(
                engine,
                rollout.runner,
                rollout.sync,
                objective=objective,
                reference=reference,
                updates=Updates(recompute_logprobs=recompute),
            )
        if recompute:
            assert step["rollout/logprob_error"] < 1e-5
        # With the rollout's log-probs as old ones, the ratio compares them with the forward of the update.
        assert step["actor/policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert abs(step["actor/kl_ref/k3"]) < 1e-8


@pytest.mark.world(1)
def test_log_probs_are_those_of_the_servers_temperature(tmp_path: Path) -> None:
    sampling, process = dataclasses.replace(SAMPLING, temperature=0.5), Process()
    try:
        for dialect in (SGLang(), VLLM()):
            folder = tmp_path / type(dialect).__name__
            with policy() as engine, on_server(process.url, dialect, folder, sampling) as (runner, sync):
                assert one_step(engine, runner, sync)["rollout/logprob_error"] < 1e-5
    finally:
        process.kill()


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("changes", "set_on_engine", "recompute", "error"),
    [
        ({"temperature": 0.5}, 1.0, True, r"TrainEngineConfig.temperature = 1.0.*sampled at temperature 0.5"),
        ({"top_p": 0.5}, None, False, r"Sampling.top_p = 0.5 with Updates.recompute_logprobs = False"),
    ],
    ids=["temperature", "top_p"],
)
def test_distribution_that_the_trainer_cannot_apply_is_refused(
    changes: dict[str, float], set_on_engine: float | None, recompute: bool, error: str
) -> None:
    options = {} if set_on_engine is None else {"temperature": set_on_engine}
    with policy(**options) as engine, played(engine, PLAN, episode(**changes)) as rollout:
        trainer = grpo_trainer(engine, rollout.runner, rollout.sync, updates=Updates(recompute_logprobs=recompute))
        with pytest.raises(ValueError, match=error):
            trainer.train(1)


@pytest.mark.world(1)
def test_rollouts_of_an_earlier_release_are_trained_with_new_ones() -> None:
    """They have neither sampling parameters nor episodes: the engine's temperature applies, and each is a member of its group."""
    plan, curve = dataclasses.replace(PLAN, max_staleness=1), Curve()
    with policy() as engine, played(engine, plan, episode(temperature=0.5)) as rollout:
        trainer = grpo_trainer(engine, rollout.runner, rollout.sync)
        trainer.train(1)
        state = trainer.state_dict()
    waiting = state["runner"][0]["waiting"]
    for name in ("numbers", "begun", "ahead"):
        del state["runner"][0][name]
    # One group of the next batch waits, and the other is played after the resume.
    del waiting[1:]
    for sequence in waiting[0]["sequences"]:
        del sequence["episode"]
        for segment in sequence["segments"]:
            del segment["sampling"]
    with policy(temperature=0.5) as engine, played(engine, plan, episode(temperature=0.5)) as rollout:
        engine.set_version(1)
        trainer = grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve)
        trainer.load_state_dict(state)
        trainer.train(2)
    assert curve["rollout/sequences"] == [6]
