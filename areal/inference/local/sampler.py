"""Sampling: from logits to a token and its log-prob, with separate noise for each request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import FutureRequestState

from areal.inference.protocol import Completion, FinishReason, Sampling, TopTokens, drawn_media
from areal.inference.stop_strings import StopStrings


def log_probs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the distributions from which tokens are drawn.

    Temperature is applied first, then ``top_k``, then ``top_p`` of the remaining tokens (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020). Tokens as likely as the last kept one are kept too, so that ties do not depend on their order. Greedy rows have
    temperature 1 and keep all tokens.

    Args:
        logits: ``[n, V]``.
        samplings: sampling parameters of each row.

    Returns:
        float32 ``[n, V]`` in nats; ``-inf`` for excluded tokens.
    """
    # 1. Temperature, for all rows at once.
    greedy = [s.temperature == 0 for s in samplings]
    temperature = [1.0 if g else s.temperature for g, s in zip(greedy, samplings, strict=True)]
    out = logits.float()
    if any(t != 1 for t in temperature):
        # With its dtype: another thread that builds a model changes the default for a moment.
        out = out / torch.tensor(temperature, dtype=torch.float32, device=logits.device).unsqueeze(1)
    out = out.log_softmax(-1)
    vocab = logits.shape[1]
    # 2. top_k and top_p, for the rows that have them only: both sort the vocabulary.
    few = [i for i, s in enumerate(samplings) if 0 < s.top_k < vocab and not greedy[i]]
    if few:
        out[few] = _keep_top_k(out[few], [samplings[i].top_k for i in few])
    nucleus = [i for i, s in enumerate(samplings) if s.top_p < 1 and not greedy[i]]
    if nucleus:
        out[nucleus] = _keep_top_p(out[nucleus], [samplings[i].top_p for i in nucleus])
    return out


def _keep_top_k(logprobs: Tensor, top_k: list[int]) -> Tensor:
    """Exclude tokens less likely than the ``top_k``-th of their row, and normalise."""
    largest = logprobs.topk(max(top_k), -1).values
    last = largest.gather(1, torch.tensor(top_k, device=logprobs.device).unsqueeze(1) - 1)
    return logprobs.masked_fill(logprobs < last, -torch.inf).log_softmax(-1)


def _keep_top_p(logprobs: Tensor, top_p: list[float]) -> Tensor:
    """Exclude tokens outside the smallest set of most likely ones with total probability ``top_p``, and normalise."""
    largest = logprobs.sort(-1, descending=True).values
    p = largest.double().exp()
    # A token is kept if the tokens before it add up to less than top_p. float64: the sum has V terms.
    before = p.cumsum(-1) - p
    count = (before < torch.tensor(top_p, dtype=p.dtype, device=p.device).unsqueeze(1)).sum(-1, keepdim=True)
    return logprobs.masked_fill(logprobs < largest.gather(1, (count - 1).clamp_min(0)), -torch.inf).log_softmax(-1)


def noise_size(vocab: int) -> int:
    """Return the number of random numbers of one draw from ``vocab`` tokens: one per run of tokens, and one per token of a run."""
    run = math.isqrt(vocab - 1) + 1
    return -(-vocab // run) + run


def sample_tokens(logprobs: Tensor, noise: Tensor) -> Tensor:
    """Draw a token of each row by the Gumbel-max trick (Gumbel, 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014).

    The token with the largest ``p / e`` is a draw from ``p`` if the ``e`` are independent draws from Exp(1). The draw has two stages: a run
    of about ``sqrt(V)`` adjacent tokens by its total probability, then a token of that run. A draw therefore needs ``2 sqrt(V)`` random
    numbers instead of ``V``. The same noise gives the same token unless probabilities change much: after a change of total variation ``d``,
    about ``2 d`` of the draws differ. Draws from cumulative sums would differ more often, at each of the ``V`` boundaries.

    Args:
        logprobs: ``[n, V]``, normalised.
        noise: float64 ``[n, noise_size(V)]``, drawn from Exp(1). float32 is too coarse near 0: tokens less likely than 1e-7 would be drawn
            too often.

    Returns:
        int64 ``[n]``. Token ids.
    """
    rows, vocab = logprobs.shape
    run = math.isqrt(vocab - 1) + 1
    runs = -(-vocab // run)
    p = torch.nn.functional.pad(logprobs.exp(), (0, runs * run - vocab)).view(rows, runs, run)
    # Stage 1: the run. Stage 2: the token within it.
    first = (p.sum(-1, dtype=torch.float64) / noise[:, :runs]).argmax(-1)
    inside = p[torch.arange(rows, device=p.device), first].double() / noise[:, runs:]
    return first * run + inside.argmax(-1)


def top_tokens(logprobs: Tensor, count: int) -> list[TopTokens]:
    """Return the ``count`` most likely tokens of each row of ``logprobs`` ``[n, V]``; an empty list for a count of 0."""
    if not count:
        return []
    values, ids = logprobs.topk(min(count, logprobs.shape[1]))
    return [TopTokens(tuple(i), tuple(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a model's ``generation_config``, which has one, several or none."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


@dataclass
class Request:
    """State of one answer during generation.

    Attributes:
        sampling: sampling parameters.
        seed: seed of its noise; any integer, taken modulo 2^64.
        tokens, logprobs, versions, top: see :class:`~areal.inference.protocol.Completion`.
        stop: its stop strings, if it has some.
    """

    sampling: Sampling
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    stop: StopStrings | None = None

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed % 2**64)

    def noise(self, size: int) -> np.ndarray:
        """Return the next numbers from Exp(1), float64 ``[size]``. Every token uses the same count, so the noise of token ``k`` is fixed."""
        return np.maximum(-np.log1p(-self._generator.random(size)), 1e-300)

    def completion(self, finish_reason: FinishReason | None = None) -> Completion:
        """Return the answer. Without a ``finish_reason`` it is ``"stop"`` or ``"length"``, by its last token."""
        count = len(self.versions)  # appended last: while another thread samples, the other lists may be longer
        if finish_reason is None:
            finish_reason = "stop" if self.tokens[-1] in (self.sampling.stop_token_ids or ()) else "length"
        return Completion(
            tuple(self.tokens[:count]),
            tuple(self.logprobs[:count]),
            tuple(self.versions[:count]),
            finish_reason,
            self.sampling,
            tuple(self.top[:count]),
        )


class RequestSampler(ContinuousBatchingLogitsProcessorList):
    """Sampler for transformers' continuous batching, in place of its list of logits processors.

    For each forward, the manager calls :meth:`prepare_tensor_args` with the requests in row order, then :meth:`__call__` with the scores,
    both on the generation thread. The drawn token gets the highest score of its row, so that a greedy manager selects it. Asynchronous
    batching must be off: it drops tokens after they are drawn.

    Args:
        version: version of the weights.
        started: called on the generation thread with the name of a request that has its first token.
        stopped: called on the generation thread with the name of a request whose text has a stop string.
        scheduled: called on the generation thread before each forward, with its requests in the order of their tokens.
        failed: called on the generation thread with the name of a request whose logits are not finite, or which draws a refused token, and
            the text of an error.
        refused: tokens that stand for an image, a video or sound, which an answer does not have.

    Attributes:
        version: version of the weights of the next forward. Change it only while generation is paused.
    """

    def __init__(
        self,
        version: int,
        started: Callable[[str], None] = lambda name: None,
        stopped: Callable[[str], None] = lambda name: None,
        scheduled: Callable[[Sequence[FutureRequestState]], None] = lambda requests: None,
        failed: Callable[[str, str], None] = lambda name, text: None,
        refused: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.version = version
        self._started, self._stopped, self._scheduled, self._failed = started, stopped, scheduled, failed
        self._refused = refused
        self._requests: dict[str, Request] = {}
        self._outdated: frozenset[str] = frozenset()
        self._batch: list[FutureRequestState] = []
        self._rows: list[tuple[str, Request | None]] = []

    def add(self, name: str, request: Request) -> None:
        """Register a request. Call it before the manager gets the request."""
        self._requests[name] = request

    def remove(self, name: str) -> None:
        """Delete a request. If it still runs, its tokens are ignored."""
        self._requests.pop(name, None)

    def keep_private(self, names: Sequence[str]) -> None:
        """Exclude the keys and values of these requests from sharing, because older weights computed them."""
        self._outdated = self._outdated.intersection(self._requests).union(names)

    def prepare_tensor_args(self, requests_in_batch: list[FutureRequestState], arg_storage: Tensor) -> Tensor:
        """Record which request belongs to which row of the next scores. Called by the manager."""
        self._scheduled(requests_in_batch)
        self._batch = requests_in_batch
        for future in requests_in_batch:
            if future.state.request_id in self._outdated:
                future.complete_blocks = {}  # the manager registers these for sharing after the forward
        # Only requests at the end of their prompt, or beyond, get a token from this forward.
        names = [future.state.request_id for future in requests_in_batch if future.has_new_token]
        self._rows = [(name, self._requests.get(name)) for name in names]
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Draw a token for each row, and give it the score ``inf``. Called by the manager.

        Args:
            input_ids: not used.
            scores: float32 ``[m, V]``. Modified in place. Rows after those of the requests are ignored.
            logits_processor_args: not used.
        """
        # Rows of cancelled requests are left as they are.
        live = [(row, name, request) for row, (name, request) in enumerate(self._rows) if request is not None]
        if live:
            rows, names, requests = zip(*live, strict=True)
            tokens, logprobs, tops = self._sample(scores[list(rows)], requests)
            scores[list(rows), tokens] = torch.inf
            drawn = zip(names, requests, tokens.tolist(), logprobs.tolist(), tops, strict=True)
            for name, request, token, logprob, top in drawn:
                # Broken weights must not look like an answer.
                if not math.isfinite(logprob):
                    self._fail(name, logprob)
                    continue
                if token in self._refused:
                    self._failed(name, drawn_media(token))
                    continue
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.top += top
                # Last: Request.completion counts the versions.
                request.versions.append(self.version)
                if len(request.versions) == 1:
                    self._started(name)
                if request.stop is not None and request.stop.end(request.tokens):
                    self._stopped(name)
        return scores

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor, list[list[TopTokens]]]:
        """Return a token ``[n]`` and its log-prob ``[n]`` for each request, and the most likely tokens if it asks for some."""
        samplings = [request.sampling for request in requests]
        logprobs = log_probs(logits, samplings)
        size = noise_size(logits.shape[1])
        # A greedy request consumes no noise; its row is replaced by the argmax below.
        greedy = [sampling.temperature == 0 for sampling in samplings]
        noise = np.stack([np.ones(size) if g else r.noise(size) for g, r in zip(greedy, requests, strict=True)])
        tokens = sample_tokens(logprobs, torch.from_numpy(noise).to(logits.device))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        tops = [top_tokens(logprobs[row : row + 1], each.top_logprobs) for row, each in enumerate(samplings)]
        return tokens, chosen, tops

    def _fail(self, name: str, logprob: float) -> None:
        """Fail one request. Keys and values of this forward may be broken for all requests in it: later requests must not use them."""
        for future in self._batch:
            future.complete_blocks = {}
        self.keep_private([future.state.request_id for future in self._batch])
        self._failed(
            name,
            f"a sampled token has the log-prob {logprob}: the logits of version {self.version} are not finite, so the weights or the "
            "adapter are broken, or the temperature is too small",
        )
