"""What a model that generates is asked for and answers: sampling parameters, completions with log-probs and weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from areal.utils.data.image_prompt import ImagePrompt, Prompt
from areal.utils.data.sequences import ROUTED_EXPERTS, Segment

FinishReason = Literal["stop", "length", "aborted"]
"""``"stop"``: the last token is a stop token, or completes a stop string. ``"length"``: ``max_new_tokens`` or the context limit was reached.
``"aborted"``: the request was ended early."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        max_new_tokens: maximum number of tokens of the answer.
        temperature: divisor of the logits; 0 selects the most likely token (greedy).
        top_p: keep the smallest set of most likely tokens whose probabilities add up to this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        stop_token_ids: tokens that end an answer. They are part of it. ``None``: the end-of-sequence tokens of the model's
            ``generation_config``, if it has any. ``()``: none, so that every answer has ``max_new_tokens``.
        seed: seed of this request. The same seed, prompt and weights give the same tokens, regardless of concurrent requests. ``None`` draws
            a seed.
        stop: strings that end an answer as soon as its text has one, however it is cut into tokens. The token that completes the string is part
            of the answer, and so may be a few characters after it.
        top_logprobs: number of most likely tokens to return at each position.

    Raises:
        ValueError: a number is out of range, or a stop string is empty.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        # Each field with its condition and the text of the rule.
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0; 0 takes the most likely token"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1; 1 keeps all tokens"),
            "top_k": (self.top_k >= 0, "at least 0; 0 keeps all tokens"),
            "top_logprobs": (self.top_logprobs >= 0, "at least 0; 0 returns none"),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a tuple of strings that are not empty"),
        }
        for name, (fits, rule) in limits.items():
            if not fits:
                raise ValueError(f"Sampling.{name} = {getattr(self, name)!r}: it must be {rule}")

    def distribution(self) -> dict[str, float]:
        """Return the parameters that change the distribution from which tokens are drawn, by name."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


class TopTokens(NamedTuple):
    """The most likely tokens at one position, the most likely first, with their log-probs in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Completion:
    """An answer of the model.

    Attributes:
        tokens: sampled ids, including the stop token.
        logprobs: log-prob of each token in nats, under the distribution from which it was drawn: after temperature, ``top_k`` and
            ``top_p``; for greedy answers, at temperature 1.
        versions: version of the weights that generated each token.
        finish_reason: why generation ended.
        sampling: parameters of the request; ``None`` if unknown. A sample that is made from the answer carries them.
        top: the most likely tokens at each position, under the same distribution; empty without ``Sampling.top_logprobs``. Servers leave out
            tokens that ``top_p`` and ``top_k`` exclude.
        routed_experts: integers ``[P + M - 1, L, K]``. The ``K`` experts of each token of prompt and answer but the last, in each of the ``L``
            layers with experts; ``None`` if they are not known.

    Raises:
        ValueError: the lengths differ.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    sampling: Sampling | None = None
    top: tuple[TopTokens, ...] = ()
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a completion has {len(self.tokens)} tokens, {len(self.logprobs)} log-probs and {len(self.versions)} versions: "
                "one of each belongs to every token"
            )

    def segment(self) -> Segment:
        """Return the answer as a trainable segment of a sequence, with ``rollout_logprobs``, ``versions`` and sampling parameters."""
        return Segment(
            self.tokens,
            trainable=True,
            values={
                "rollout_logprobs": torch.tensor(self.logprobs, dtype=torch.float32),
                "versions": torch.tensor(self.versions, dtype=torch.int64),
            },
            sampling={} if self.sampling is None else self.sampling.distribution(),
        )

    def after(self, prompt: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return the segments of a sequence that ends with this answer.

        Each token has the experts of the one before, which predicted it, as ``routed_experts``: index ``t`` of a sample has those of token
        ``t``. Earlier answers keep those with which they were generated.

        Args:
            prompt: segments of the prompt.

        Raises:
            ValueError: the prompt has another number of tokens than experts.
        """
        segments = (*prompt, self.segment())
        if self.routed_experts is None:
            return segments
        recorded = self.routed_experts
        rows = torch.cat([recorded.new_full((1, *recorded.shape[1:]), -1), recorded])
        sizes = [len(each.tokens) for each in segments]
        if sum(sizes) != len(rows):
            raise ValueError(f"experts of {len(recorded)} tokens for a sequence of {sum(sizes)}: expected one less")
        return tuple(
            each if ROUTED_EXPERTS in each.values else replace(each, values={**each.values, ROUTED_EXPERTS: own})
            for each, own in zip(segments, rows.split(sizes), strict=True)
        )


def drawn_media(token: int) -> str:
    """Return the text of the error of an answer with a token that stands for an image, a video or sound."""
    return f"the model drew the token {token}, which stands for an image, a video or sound"


def without_media(answer: Completion, media: frozenset[int]) -> Completion:
    """Return an answer.

    Raises:
        RuntimeError: it has a token of ``media``.
    """
    for token in media.intersection(answer.tokens):
        raise RuntimeError(drawn_media(token))
    return answer


def checked_prompt(prompt_ids: Prompt, vocab_size: int | None = None) -> list[int]:
    """Return a prompt as a list of token ids.

    Args:
        prompt_ids: token ids; without images, which this caller does not send.
        vocab_size: number of token ids of the model; ``None`` if unknown. SGLang does not check, and a token that it lacks ends it.

    Raises:
        ValueError: it is empty, text, has images, or a token that the model does not have.
    """
    if isinstance(prompt_ids, ImagePrompt):
        raise ValueError(
            "the prompt has images, and this request sends tokens alone: the model would answer without seeing them. LocalRollout.generate "
            "takes images; or leave them out"
        )
    if isinstance(prompt_ids, str):
        raise ValueError(
            f"prompt_ids is the text {prompt_ids[:20]!r}...: pass token ids, such as those of tokenizer.apply_chat_template(..., tokenize=True)"
        )
    prompt = [int(token) for token in prompt_ids]
    if not prompt:
        raise ValueError("prompt_ids is empty: an answer needs at least one token to go on from")
    if vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        token = max(prompt) if min(prompt) >= 0 else min(prompt)
        raise ValueError(
            f"prompt_ids has the token {token}, and the model a vocabulary of {vocab_size}: use the tokenizer of the model"
        )
    return prompt


class RolloutClient(Protocol):
    """Interface through which an episode generates."""

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""

    async def generate(self, prompt_ids: Prompt, sampling: Sampling) -> Completion:
        """Generate an answer to a prompt.

        Args:
            prompt_ids: token ids of the prompt, at least one; with images as an :class:`~areal.utils.data.image_prompt.ImagePrompt`.
            sampling: sampling parameters.

        Raises:
            ValueError: the prompt is empty, or prompt and ``max_new_tokens`` together exceed the context; or it has images, and the client
                sends tokens alone.
            RuntimeError: the rollout engine was closed, or failed.
        """
