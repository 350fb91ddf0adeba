"""What a rollout is made of: tokens in, tokens out, and for every sampled token its log-prob and the weights that made it."""

from __future__ import annotations

import collections.abc
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from areal.utils.data.sequences import Segment, from_segments, where_trained

FinishReason = Literal["stop", "length", "aborted"]
"""A stop token was sampled (and is the last of the tokens); ``max_new_tokens`` are there, or all that the engine's context
holds; somebody ended it before."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: most tokens of one answer.
        temperature: what logits are divided by; 0 takes the most likely token.
        top_p: keeps the fewest most likely tokens whose probabilities reach this sum; 1 keeps all.
        top_k: keeps this many most likely tokens; 0 keeps all.
        stop_token_ids: end an answer, and belong to it.
        seed: of this request alone: the same seed, prompt and weights give the same tokens, whatever else runs beside it. ``None``
            draws one.

    Raises:
        ValueError: a number is out of its range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0; 0 takes the most likely token"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1; 1 keeps all tokens"),
            "top_k": (self.top_k >= 0, "at least 0; 0 keeps all tokens"),
        }
        for name, (fits, rule) in limits.items():
            if not fits:
                raise ValueError(f"Sampling.{name} = {getattr(self, name)}: it must be {rule}")


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        tokens: ids that were sampled, the stop token included.
        logprobs: of each token in nats, under the distribution that it was drawn from (after temperature, ``top_k`` and ``top_p``;
            for greedy answers under temperature 1).
        versions: of each token, the version of the weights that made it.
        finish_reason: why it ended.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a completion has {len(self.tokens)} tokens, {len(self.logprobs)} log-probs and {len(self.versions)} versions: "
                "one of each belongs to every token"
            )

    def segment(self) -> Segment:
        """As a trainable piece of a sequence, with its log-probs and versions."""
        return Segment(
            self.tokens,
            trainable=True,
            values={
                "rollout_logprobs": torch.tensor(self.logprobs, dtype=torch.float32),
                "versions": torch.tensor(self.versions, dtype=torch.int64),
            },
        )


class RolloutClient(Protocol):
    """What an episode talks to."""

    @property
    def version(self) -> int:
        """Of the weights that are serving now."""

    async def generate(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> Completion:
        """Continue a prompt.

        Raises:
            ValueError: the prompt is empty, or with ``max_new_tokens`` longer than the engine allows.
            RuntimeError: the engine has stopped, or failed.
        """


@dataclass(frozen=True)
class Sequence:
    """One trajectory to learn from: what the policy wrote, between what it was given, and what it was worth.

    Attributes:
        segments: in order; those of the policy are trainable.
        reward: of the whole.
        group: sequences of one item are compared with each other; set by who runs the episodes.
        truncated: the answer was cut off at its longest.
        stats: numbers whose means are logged, as ``rollout/<name>``.

    Raises:
        ValueError: the reward is not finite, or the policy wrote nothing of it.
    """

    segments: tuple[Segment, ...]
    reward: float
    group: int = 0
    truncated: bool = False
    stats: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"Sequence.reward = {self.reward}: it must be finite")
        if not self.trained_tokens:
            raise ValueError(
                "a sequence has no token that the policy wrote: leave out what there is nothing to learn from"
            )

    @classmethod
    def single(cls, prompt_ids: collections.abc.Sequence[int], completion: Completion, reward: float) -> Sequence:
        """A prompt and one answer."""
        return cls(
            (Segment(list(prompt_ids), trainable=False), completion.segment()),
            reward,
            truncated=completion.finish_reason == "length",
        )

    def sample(self) -> dict[str, Tensor]:
        """As a sample of an engine's batch: ``input_ids``, ``loss_mask``, ``rollout_logprobs``, ``versions`` ``[S]``, position-aligned,
        and ``rewards``, ``group_ids`` and ``truncated`` scalars, which become ``[n]`` in a batch. Engines give log-probs and entropy
        where it is trained on alone: ``output_mask``.
        """
        return {
            **where_trained(from_segments(self.segments)),
            "rewards": torch.tensor(self.reward, dtype=torch.float32),
            "group_ids": torch.tensor(self.group, dtype=torch.int64),
            "truncated": torch.tensor(self.truncated),
        }

    def oldest_version(self, default: int) -> int:
        """Of the weights that made the oldest of its sampled tokens; ``default`` where it has none."""
        found = [
            int(versions.min())
            for segment in self.segments
            if segment.trainable and len(versions := torch.as_tensor(segment.values.get("versions", ())))
        ]
        return min(found, default=default)

    def state(self) -> dict[str, Any]:
        """As containers, numbers and tensors, which a checkpoint can hold."""
        return {
            "segments": [
                {
                    "tokens": torch.as_tensor(segment.tokens, dtype=torch.int64),
                    "trainable": segment.trainable,
                    "values": {name: torch.as_tensor(value) for name, value in segment.values.items()},
                }
                for segment in self.segments
            ],
            "reward": float(self.reward),
            "group": self.group,
            "truncated": self.truncated,
            "stats": dict(self.stats),
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Sequence:
        """What :meth:`state` was taken of."""
        segments = tuple(Segment(each["tokens"], each["trainable"], each["values"]) for each in state["segments"])
        return cls(segments, state["reward"], state["group"], state["truncated"], state["stats"])

    @property
    def trained_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return sum(len(segment.tokens) for segment in self.segments if segment.trainable)


class Episode(Protocol):
    """What happens between taking an item and having sequences to learn from: any number of turns, tools, branches."""

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Play once. What it raises is counted as a failed episode; the run goes on."""
