"""Pairs of answers to problems: the bare number, as instructed, is preferred to a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat import ChatFormat
from settings import TaskConfig
from tasks import Problem, Task, make_task

from areal import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.trainer.preference import Pair


@dataclass(frozen=True)
class PreferenceConfig(TaskConfig):
    """One run on pairs."""

    model: str = "runs/tiny"
    """Model directory or hub name. examples/tiny.py writes the default."""
    steps: int = 20
    """Optimizer steps."""
    batch_size: int = 16
    """Pairs in a global batch."""
    eval_size: int = 64
    """Held-out pairs."""
    lr: float = 1e-3
    """Learning rate of AdamW; about 1e-6 to 1e-5 for a pretrained model."""
    max_tokens_per_mb: int = 1024
    """Maximum tokens in a packed micro-batch."""
    seed: int = 0
    """Seed of the problems."""
    output: Path = Path("runs/preferences")
    """Output directory."""

    def engine(self, **changes: Any) -> TrainEngineConfig:
        """Return the configuration of an engine."""
        fields: dict[str, Any] = {
            "path": self.model,
            "backend": self.backend,
            "dtype": self.compute_dtype,
            "seed": self.seed,
            "mb_spec": MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, granularity=2, share_prefixes=True),
            "optimizer": OptimizerConfig(lr=self.lr),
            "lora": self.lora,
        }
        return TrainEngineConfig(**fields | changes)


def make_pairs(config: PreferenceConfig, chat: ChatFormat) -> tuple[list[Pair], list[Pair]]:
    """Return training pairs and held-out pairs."""
    task: Task = make_task(
        config.task, config.steps * config.batch_size, config.eval_size, config.seed, config.task_options
    )

    def pairs(problems: Sequence[Problem]) -> list[Pair]:
        return [
            Pair(
                chat.prompt_ids(problem),
                chosen=chat.response_ids(problem),
                rejected=chat.response_ids(_wordy(problem)),
            )
            for problem in problems
        ]

    return pairs(task.train), pairs(task.held_out)


def _wordy(problem: Problem) -> Problem:
    """Return the problem with a sentence as its answer."""
    return Problem(problem.question, f"The answer is {problem.answer}.", problem.entry)
