"""Pairs of answers to problems: a bare one, as it was asked for, is better than a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chat import ChatFormat
from tasks import Problem, Task, make_task

from areal import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.trainer.pairs import Pair
from areal.utils.platform import fast_dtype


@dataclass(frozen=True)
class PreferenceConfig:
    """One run on pairs."""

    model: str = "runs/tiny"
    """Model directory or hub name."""
    backend: str = "fsdp:d1"
    """Engine and layout; its degrees multiply to the number of processes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the compute; auto takes what the machine multiplies fastest."""
    task: str = "chain_sum"
    """Data set of reasoning-gym."""
    task_options: dict[str, int | float | str] = field(default_factory=dict)
    """Options of the data set, as name and value pairs."""
    system: str = "Answer with just the number."
    """Instruction before each question."""
    steps: int = 20
    """Optimizer steps."""
    batch_size: int = 16
    """Pairs in a global batch."""
    eval_size: int = 64
    """Held-out pairs."""
    lr: float = 1e-3
    """Learning rate of AdamW; a real model wants about 1e-6 to 1e-5."""
    max_tokens_per_mb: int = 1024
    """Tokens in a packed micro-batch."""
    seed: int = 0
    """Of the problems."""
    output: Path = Path("runs/preferences")
    """Directory of what the run leaves."""

    def engine(self, **changes: Any) -> TrainEngineConfig:
        """What of it is an engine's."""
        fields: dict[str, Any] = {
            "path": self.model,
            "backend": self.backend,
            "dtype": fast_dtype() if self.dtype == "auto" else self.dtype,
            "seed": self.seed,
            "mb_spec": MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb, granularity=2),
            "optimizer": OptimizerConfig(lr=self.lr),
        }
        return TrainEngineConfig(**fields | changes)


def make_pairs(config: PreferenceConfig, chat: ChatFormat) -> tuple[list[Pair], list[Pair]]:
    """Pairs to learn from, and held-out ones."""
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
    return Problem(problem.question, f"The answer is {problem.answer}.", problem.entry)
