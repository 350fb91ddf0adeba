"""Policy optimisation on rollouts: it learns, the same on any layout, ahead of its rollout or not, and goes on from a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api import LoRAConfig
from areal.tests.dist.trainer.ppo_runs import CRITIC, GOLDEN, OPTIMIZER, PLAN, STEPS, run
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import chosen, layout, started, weights_of
from areal.tests.harness.world import record
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.estimators import CriticBased
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer
from areal.trainer.rollout.plan import Plan
from areal.trainer.updates import Updates


def policy(backend: str, **changes: Any) -> Any:
    return started(backend, **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **changes})


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "megatron:t2"))
def test_grpo_learns_the_same_on_every_layout(backend: str) -> None:
    """Rewards, losses and gradient norms of twenty steps are those in the golden file; on other layouts than the first, of eight."""
    steps = STEPS if backend == "fsdp:d2" else 8
    golden = {name: values[:steps] for name, values in json.loads(GOLDEN.read_text()).items()}
    with policy(backend) as engine, policy(backend, optimizer=None) as reference:
        curve, _ = run(engine, PLAN, steps, reference=reference, updates=Updates(minibatches=2))
    assert steps < STEPS or golden["rollout/reward"][-1] > golden["rollout/reward"][0] + 0.2, "nothing is learned"
    errors = {
        name: max(abs(a - b) / max(abs(b), 0.05) for a, b in zip(curve[name], expected, strict=True))
        for name, expected in golden.items()
    }
    record("GRPO curves", f"{backend}, {steps} steps", **{name: f"{error:.0e}" for name, error in errors.items()})
    assert max(errors.values()) < 2e-3, errors
    assert max(curve["rollout/logprob_error"]) < 1e-5, "trainer and rollout agree to rounding"


@pytest.mark.world(2)
def test_grpo_learns_from_stale_rollouts() -> None:
    plan = Plan(groups=6, group_size=4, max_staleness=2)
    with policy("fsdp:d2") as engine:
        curve, _ = run(engine, plan, STEPS)
    assert max(curve["rollout/staleness"]) > 0.5
    assert max(curve["rollout/staleness"]) <= 2
    assert curve["actor/mismatch/k3"][-1] > 0
    assert curve["rollout/logprob_k3"][-1] > 1e-4
    assert sum(curve["rollout/reward"][-3:]) / 3 > sum(curve["rollout/reward"][:3]) / 3 + 0.15


@pytest.mark.world(1)
def test_ppo_with_a_critic_learns() -> None:
    backend, curve = "fsdp:d1", Curve()
    updates = Updates(epochs=2, minibatches=2)
    with (
        policy(backend) as engine,
        policy(backend, value_head=True, optimizer=CRITIC) as value_engine,
        policy(backend, optimizer=None) as reference,
        played(engine, PLAN) as rollout,
    ):
        trainer = PPOTrainer(
            engine,
            ppo_objective(),
            rollout.runner,
            rollout.sync,
            estimator=CriticBased(kl_coef=0.02),
            reference=reference,
            critic=Critic(value_engine, value_objective()),
            updates=updates,
            tracker=curve,
        )
        trainer.train(15)
        assert engine._components.optimizer.steps == 15 * 4
    assert sum(curve["rollout/reward"][-3:]) / 3 > sum(curve["rollout/reward"][:3]) / 3 + 0.15
    assert sum(curve["critic/loss"][-3:]) < 0.5 * sum(curve["critic/loss"][:3])


@pytest.mark.parametrize(("backend", "staleness"), [layout("fsdp:d2", 1), layout("megatron:p2", 0)])
def test_training_resumes_from_checkpoint(backend: str, staleness: int, tmp_path: Path) -> None:
    """With rollouts that wait: they are in the checkpoint, with the versions that made them."""
    plan = Plan(groups=4, group_size=4, max_staleness=staleness)
    kept = Checkpoints(tmp_path, every=3)
    with policy(backend) as engine:
        full, _ = run(engine, plan, 4, checkpoints=kept)
    with policy(backend) as engine:
        rest, trainer = run(engine, plan, 4, checkpoints=kept)
        assert trainer.step == 4
        assert engine.version == 4
    assert len(rest.steps) == 1
    names = ("rollout/reward", "rollout/staleness", "actor/loss", "actor/grad_norm")
    assert [rest[name][0] for name in names] == pytest.approx([full[name][3] for name in names], rel=1e-4, abs=1e-6)


@pytest.mark.world(2)
def test_refresh_reference_copies_policy_weights(tmp_path: Path) -> None:
    with policy("fsdp:d2") as engine, policy("fsdp:d2", optimizer=None) as reference, played(engine, PLAN) as rollout:
        trainer = grpo_trainer(engine, rollout.runner, rollout.sync, reference=reference)
        trainer.train(2)
        before = weights_of(reference)
        trainer.refresh_reference(tmp_path / "reference")
        after, mine = weights_of(reference), weights_of(engine)
    assert not all(torch.equal(after[name], before[name]) for name in after)
    assert all(torch.equal(after[name], mine[name]) for name in after)


@pytest.mark.parametrize("backend", chosen("fsdp:d2"))
def test_adapters_learn_with_base_model_as_reference(backend: str) -> None:
    """As with a second engine for the reference; the rollout gets merged weights."""
    lora, curves = LoRAConfig(rank=8, alpha=64), []
    for alone in (True, False):
        with policy(backend, lora=lora) as engine, policy(backend, optimizer=None) as second:
            curve, trainer = run(engine, PLAN, 6, reference=engine if alone else second)
            curves.append(curve)
        if alone:
            with pytest.raises(RuntimeError, match="no reference to refresh"):
                trainer.refresh_reference("nowhere")
    assert curves[0]["actor/loss"] == curves[1]["actor/loss"]
    assert curves[0]["rollout/reward"] == curves[1]["rollout/reward"]
    assert curves[0]["actor/kl_ref/k3"][-1] > 1e-4 > curves[0]["actor/kl_ref/k3"][0]
    assert max(curves[0]["rollout/logprob_error"]) < 1e-5
    with policy(backend) as engine, pytest.raises(ValueError, match="without adapters"):
        run(engine, PLAN, 1, reference=engine)


if __name__ == "__main__":
    with policy("fsdp:d1") as only, policy("fsdp:d1", optimizer=None) as still:
        noted, _ = run(only, PLAN, STEPS, reference=still, updates=Updates(minibatches=2))
    names = ("rollout/reward", "rollout/tokens", "actor/loss", "actor/grad_norm", "actor/kl_ref/k3")
    GOLDEN.write_text(json.dumps({name: noted[name] for name in names}, indent=1) + "\n")
    print(*(f"{name}: {noted[name]}" for name in noted.steps[0]), sep="\n")
