"""A small task for algorithms: answer with tokens of the lower half of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from areal.api import TensorSource, TrainEngine
from areal.inference.local.rollout import LocalRollout
from areal.inference.protocol import Completion, Sampling
from areal.tests.grid.models import VOCAB
from areal.trainer.rollout.episodes import Episode, SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner

SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(1,))


class Prompts:
    """Dataset of random prompts."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(3, VOCAB, (3 + index % 5,), generator=generator).tolist()


def reward(item: list[int], answer: Completion) -> float:
    """Return the fraction of answer tokens in the lower half of the vocabulary, without the end token."""
    written = [token for token in answer.tokens if token != 1]
    return sum(token < VOCAB // 2 for token in written) / max(1, len(written))


EPISODE = SingleTurn(lambda item: item, reward, SAMPLING)


class Curve:
    """Logger that records values."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.steps.append(dict(scalars))

    def close(self) -> None:
        """Do nothing."""

    def __getitem__(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]


class Played:
    """A rollout in this process and a runner over it.

    Attributes:
        rollout: the started rollout.
        runner: the runner over it.
    """

    def __init__(self, path: str, plan: Plan, episode: Episode = EPISODE, **options: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.rollout = LocalRollout(model, max_context=64, max_requests=32)
        self.runner = Runner(self.rollout, episode, Prompts(), plan, **options)

    def sync(self, source: TensorSource, version: int) -> None:
        """Copy an engine's weights to the rollout."""
        self.rollout.update(source.named_tensors(), version)

    def close(self) -> None:
        """Close both."""
        self.runner.close()
        self.rollout.close()


@contextmanager
def played(engine: TrainEngine, plan: Plan, episode: Episode = EPISODE, **options: Any) -> Iterator[Played]:
    """Start a rollout of an engine's model."""
    with ExitStack() as stack:
        made = Played(engine.config.path, plan, episode, **options)
        stack.callback(made.close)
        yield made
