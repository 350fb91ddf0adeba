"""Validated requests as a backend receives them, and its results. Arrays are numpy's, in the caller's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Scalar = float | str
"""Value of a loss configuration."""


@dataclass(frozen=True)
class AdapterSpec:
    """Adapter of a model.

    Attributes:
        rank: rank of its factors, at least 1.
        seed: seed of its initial factors; ``None`` lets the backend draw one.
        attention, mlp, head: kinds of layers that have factors; at least one is true.
    """

    rank: int
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    head: bool = True


@dataclass(frozen=True)
class Datum:
    """One training sample of ``T`` tokens. Index ``t`` refers to the prediction made at position ``t``.

    Attributes:
        input_ids: int64 ``[T]``, each within the vocabulary.
        target_ids: int64 ``[T]`` or ``[T, K]``, each within the vocabulary. Sparse tensors of the protocol are dense here.
        values: float32 arrays of the shape of ``target_ids`` by the protocol's name: ``weights``, ``logprobs``, ``advantages``,
            ``sequence_ratio_mask``. Exactly those that the loss reads; finite.
    """

    input_ids: np.ndarray
    target_ids: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PreparedBatch:
    """One forward or forward_backward request, after validation.

    Attributes:
        model_id: model that the request names.
        data: samples; at least one.
        loss: name of the loss in the protocol.
        config: configuration of the loss, with known keys only; missing keys have their defaults.
    """

    model_id: str
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(datum.input_ids) for datum in self.data)


@dataclass(frozen=True)
class PassResult:
    """Result of one forward or forward_backward request.

    Attributes:
        logprobs: for each datum, float32 log-probs of its targets in nats, of the shape of its ``target_ids``.
        metrics: numbers by name with the suffix of their reduction; ``loss:sum`` is always there.
    """

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AdamParams:
    """Settings of one optimizer step. A ``grad_clip_norm`` of 0 does not clip. The defaults are those of the protocol."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingRequest:
    """A request for answers to one prompt, after validation.

    Attributes:
        prompt: token ids; at least one.
        num_samples: number of answers.
        max_tokens: maximum number of tokens of an answer; ``None`` for as many as the context allows. 0: only the prompt is scored, and
            answers are empty.
        seed: seed of the request; answer ``i`` is the same whatever else the server does. ``None`` draws one.
        stop_strings, stop_token_ids: ends of an answer; ``None`` for both means the model's own end tokens.
        temperature, top_k, top_p: distribution from which tokens are drawn; ``top_k`` of -1 keeps all tokens.
        prompt_logprobs: whether to return the log-probs of the prompt's tokens.
        prompt_top_k, sample_top_k: number of most likely tokens to return at each position of the prompt and of an answer.
    """

    prompt: Sequence[int]
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    prompt_top_k: int = 0
    sample_top_k: int = 0


@dataclass(frozen=True)
class TopLogprobs:
    """The ``k`` most likely tokens at ``n`` positions: ``ids`` int32 and ``logprobs`` float32, both ``[n, k]``, the most likely first.

    A position without a distribution (the first of a prompt) has the id 0 and a log-prob of NaN. A token that ``top_k`` or ``top_p`` excludes
    has the log-prob ``-inf``.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampledAnswer:
    """One answer: ``tokens`` int32 ``[n]``, ``logprobs`` float32 ``[n]`` of the distribution that was drawn from."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    logprobs: np.ndarray
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class SamplingResult:
    """Result of a sampling request. ``prompt_logprobs`` is float32 ``[len(prompt)]`` with NaN for the first token."""

    answers: Sequence[SampledAnswer]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: TopLogprobs | None = None
