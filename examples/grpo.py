"""Reinforcement learning on problems with a verifier: a short supervised warm-up, then GRPO, on any layout of ranks.

    torchrun --nproc-per-node 2 examples/grpo.py --backend fsdp:d2
    torchrun --nproc-per-node 2 examples/grpo.py --backend megatron:p2 --task simple_equations

Every rank answers a slice of the problems with a replica of the model, and the engine trains on all answers. The same
seed gives the same problems and the same sampling noise on any layout.

The run writes curves.json, curves.png, event files for TensorBoard and model/ (for transformers' from_pretrained) to the
output directory. The exit code is 1 if the condition of --max-p-value or --min-p-value is not met.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import tyro
from chat import ChatFormat
from curves import Curves
from examination import examine
from report import Report
from rl_plots import plot_run
from rl_settings import RLConfig
from significance import p_value_of_rise
from tasks import Problem, make_task
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from warm_up import warm_up

from areal import FinetuneSpec, SaveLoadMeta, TrainEngine, TrainEngineConfig, create_engine
from areal.api import TensorSource
from areal.inference import Completion, LocalRollout
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.estimators import GroupRelative, Sample
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import MismatchCorrection, grpo_objective
from areal.trainer.ppo import PPOTrainer
from areal.trainer.rollout import Runner, SingleTurn
from areal.trainer.trackers import Tracker, Trackers
from areal.trainer.trackers.tensorboard import TensorBoard
from areal.utils.distributed import init_default_group


class Run:
    """One run of reinforcement learning.

    Args:
        config: settings of the run.
    """

    engine: TrainEngine
    """Engine of the policy."""
    start: str
    """Directory of the initial model."""

    def __init__(self, config: RLConfig) -> None:
        self.config = config
        init_default_group()
        self.report = Report(enabled=dist.get_rank() == 0)
        self.chat = ChatFormat(AutoTokenizer.from_pretrained(config.model), config.system, plain=config.plain)
        n_warmup = config.warmup_steps * config.warmup_batch_size
        self.task = make_task(
            config.task, n_warmup + config.steps * config.groups, config.eval_size, config.seed, config.task_options
        )
        self.for_warmup, self.for_rollouts = self.task.train[:n_warmup], self.task.train[n_warmup:]
        self.end = self.chat.end_of_turn(self.task.held_out[0])
        self.curves = Curves()
        self.right: dict[int, list[bool]] = {}

    def go(self) -> list[str]:
        """Warm up, evaluate, train, evaluate, save.

        Returns:
            One sentence per condition that is not met; equal on all ranks.
        """
        config = self.config
        config.output.mkdir(parents=True, exist_ok=True)
        self.start = warm_up(config, self.chat, self.for_warmup, self.report, self.new_engine)
        with self.new_engine(config.engine(path=self.start)) as self.engine:
            self.engine.initialize(FinetuneSpec(total_train_steps=config.steps * config.minibatches))
            with self._rollout() as self.rollout:
                self.examine(0)
                self.learn()
                self.examine(config.steps)
            self.engine.save(SaveLoadMeta(config.output / "model", weight_format="hf"))
        return self.conclude()

    def new_engine(self, settings: TrainEngineConfig) -> TrainEngine:
        """Return an engine, not initialized."""
        return create_engine(settings)

    def _rollout(self) -> LocalRollout:
        """Create the rollout engine on a replica of the initial model."""
        config = self.config
        dtype = getattr(torch, config.compute_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(self.start, dtype=dtype, attn_implementation="sdpa")
        longest = max(len(self.chat.prompt_ids(problem)) for problem in (*self.for_rollouts, *self.task.held_out))
        return LocalRollout(
            model.to(self.engine.device).eval(), max_context=longest + config.max_new_tokens, page_size=4
        )

    def sync(self, source: TensorSource, version: int) -> None:
        """Copy an engine's weights to this rank's replica."""
        self.rollout.update(source.named_tensors(), version)

    def examine(self, step: int) -> None:
        """Measure accuracy on the held-out problems with the engine's weights."""
        self.sync(self.engine, self.engine.version)
        sampling = self.config.sampling(self.end, temperature=self.config.eval_temperature)
        right = examine(self.rollout, self.chat, self.task, sampling, self.config.seed)
        self.right[step] = right
        self.report.line(f"after {step} steps: {sum(right)} of {len(right)} held-out problems right")

    def learn(self) -> None:
        """Train, with a runner that runs episodes meanwhile."""
        config = self.config
        episode = SingleTurn(self.chat.prompt_ids, self.reward, config.sampling(self.end))
        with ExitStack() as stack:
            runner = Runner(self.rollout, episode, self.for_rollouts, config.plan())
            stack.callback(runner.close)
            tracker = Trackers([self.curves, TensorBoard(config.output / "events")] if dist.get_rank() == 0 else [])
            stack.callback(tracker.close)
            self.take_steps(self.trainer(runner, tracker, stack))

    def take_steps(self, trainer: PPOTrainer) -> None:
        """Train until all steps are taken."""
        with self.report.progress("step", self.config.steps, done=trainer.step) as advance:

            def report_step(scalars: dict[str, float]) -> None:
                entropy, norm = (scalars.get(name, math.nan) for name in ("actor/policy/entropy", "actor/grad_norm"))
                advance(
                    f"reward {scalars['rollout/reward']:.3f}  entropy {entropy:.3f}  "
                    f"grad norm {norm:.2f}  {scalars['time/step']:.1f} s"
                )

            trainer.train(self.config.steps, after_step=report_step)

    def trainer(self, runner: Runner, tracker: Tracker, stack: ExitStack) -> PPOTrainer:
        """Return the trainer. Further engines are closed with ``stack``."""
        config = self.config
        reference = None
        if config.kl_coef:
            reference = self.engine if config.lora else self.another_engine(stack, trained=False)
        objective = grpo_objective(
            kl_coef=config.kl_coef,
            report_entropy=True,
            correction=MismatchCorrection() if config.max_staleness else None,
        )
        return grpo_trainer(
            self.engine,
            runner,
            self.sync,
            objective=objective,
            reference=reference,
            estimator=GroupRelative(shape=self.shuffled if config.shuffle_rewards else None),
            updates=config.updates(),
            tracker=tracker,
            checkpoints=self.checkpoints(),
            profile=config.profile,
        )

    def checkpoints(self) -> Checkpoints | None:
        """Return the schedule of checkpoints; ``None`` for a run that is not resumed."""
        return None

    def another_engine(self, stack: ExitStack, **changes: Any) -> TrainEngine:
        """Return an engine with the initial weights of the policy."""
        engine = stack.enter_context(self.new_engine(self.config.engine(path=self.start, **changes)))
        engine.initialize(FinetuneSpec(total_train_steps=self.config.steps))
        return engine

    def reward(self, problem: Problem, completion: Completion) -> float:
        """Return 1 for a right answer, else 0."""
        return float(self.task.is_right(self.chat.text(completion.tokens), problem))

    def shuffled(self, rewards: Tensor, samples: list[Sample]) -> Tensor:
        """Return the rewards in random order."""
        generator = torch.Generator().manual_seed(int(samples[0]["group_ids"]) + self.config.seed)
        return rewards[torch.randperm(len(rewards), generator=generator)]

    def conclude(self) -> list[str]:
        """Write and plot the results. Returns one sentence per condition that is not met."""
        config = self.config
        before, after = self.right[0], self.right[config.steps]
        accuracy = {step: sum(right) / len(right) for step, right in self.right.items()}
        p_value = p_value_of_rise(before, after)
        self.report.line(
            f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[config.steps]:.3f} on {len(after)} problems: one-sided p = {p_value:.2g}"
        )
        if dist.get_rank() == 0:
            results: dict[str, Any] = {"settings": asdict(config), "accuracy": accuracy, "p_value": p_value}
            (config.output / "curves.json").write_text(
                json.dumps(results | {"curves": self.curves.values}, indent=1, default=str) + "\n"
            )
            title = f"GRPO, {config.backend}, {config.compute_dtype}, seed {config.seed}"
            plot_run(config.output / "curves.png", title, self.curves.values, accuracy, config.task)
        self.report.line(f"curves: {config.output / 'curves.png'}; numbers: {config.output / 'curves.json'}")
        failed = []
        if config.max_p_value is not None and not p_value < config.max_p_value:
            failed.append(
                f"accuracy did not rise beyond chance: p = {p_value:.2g}, and {config.max_p_value} was asked for"
            )
        if config.min_p_value is not None and p_value < config.min_p_value:
            failed.append(f"the control rose beyond chance: p = {p_value:.2g}")
        for sentence in failed:
            self.report.line(f"FAILED: {sentence}")
        return failed


def main(config: RLConfig, kind: Callable[[Any], Run] = Run) -> int:
    """Run. Returns the exit code."""
    if not sys.stdout.isatty():
        transformers_logging.disable_progress_bar()
    return 1 if kind(config).go() else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(RLConfig, description=__doc__)))
