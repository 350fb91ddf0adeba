"""Checks of any real server: answers across updates of its weights, and steps of GRPO."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from areal.api import MicroBatchSpec, OptimizerConfig
from areal.inference.http import HTTPRollout
from areal.inference.http.servers.dialect import Dialect
from areal.tests.harness.rl import Curve, Prompts, reward
from areal.tests.harness.tiny import started
from areal.tests.vllm.answers import TOLERANCE, Clients, endless, error, prompt, run
from areal.tests.vllm.server import replica, served_model, weights
from areal.trainer.grpo import grpo_trainer
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner


def each_version(fresh: HTTPRollout, versions: int) -> None:
    """Check that the weights of each version give its log-probs."""
    prompts = [prompt(i) for i in range(4)]
    for version in range(versions):
        if version:
            fresh.update(weights(version), version)
        assert fresh.version == version
        answers = run(*(fresh.generate(each, endless(16, seed=i)) for i, each in enumerate(prompts)))
        assert {each for answer in answers for each in answer.versions} == {version}
        assert error({version: replica(version or None)}, prompts, answers) <= TOLERANCE


def across_updates(fresh: HTTPRollout) -> Clients:
    """Check long answers of 24 clients during which the weights are updated."""
    with Clients(fresh, 24, range(300, 492, 8)) as clients:
        for version in range(1, 5):
            # Few answers: most requests have tokens of the version before.
            clients.wait_for(9)
            fresh.update(weights(version), version)
    assert not clients.faults
    assert all(answer.sampling and len(answer.tokens) == answer.sampling.max_new_tokens for answer in clients.answers)
    assert all(list(answer.versions) == sorted(answer.versions) for answer in clients.answers)
    models = {version: replica(version or None) for version in range(5)}
    assert error(models, clients.prompts, clients.answers) <= TOLERANCE
    # The judge itself: under another version, the errors are large.
    assert error({version: models[(version + 1) % 5] for version in models}, clients.prompts, clients.answers) > 1
    several = sum(len(set(answer.versions)) > 1 for answer in clients.answers)
    print(f"{several} of {len(clients.answers)} answers have several versions")
    # On a busy machine, all requests may end before the pause of one of the updates.
    assert several >= 4
    return clients


def three_steps_of_grpo(url: str, dialect: Dialect, folder: Path, max_staleness: int) -> None:
    """Check that three steps of GRPO train, and that the log-probs of answers are the trainer's."""
    curve = Curve()
    episode = SingleTurn(lambda item: item, reward, endless(24))
    plan = Plan(groups=8, group_size=8, max_staleness=max_staleness, seed=1)
    settings = {"optimizer": OptimizerConfig(lr=1e-3), "mb_spec": MicroBatchSpec(max_tokens_per_mb=2048)}
    with (
        started("fsdp:d1", path=served_model(), **settings) as engine,
        HTTPRollout(url, dialect, folder=folder, model=served_model(), deadline=120) as rollout,
    ):
        rollout.load(served_model(), 0)
        with closing(Runner(rollout, episode, Prompts(), plan)) as runner:
            trainer = grpo_trainer(
                engine, runner, lambda source, version: rollout.update(source.named_tensors(), version), tracker=curve
            )
            trainer.train(3)
        assert rollout.version >= 2
    print([{name: step[name] for name in step if name.startswith("rollout/")} for step in curve.steps])
    assert len(curve.steps) == 3
    # Each step trained: the next one has other weights.
    assert all(step["actor/grad_norm"] > 0 for step in curve.steps)
    if max_staleness:
        assert max(curve["rollout/staleness"]) > 0
    else:
        assert set(curve["rollout/staleness"]) == {0}
        assert max(curve["rollout/logprob_error"]) <= 1e-5
