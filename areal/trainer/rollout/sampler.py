"""Drawing tokens: from logits to a token and its log-prob, for each request with its own noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import FutureRequestState

from areal.trainer.rollout.protocol import Completion, FinishReason, Sampling


def log_probs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The distributions that tokens are drawn from.

    Temperature comes first, then ``top_k``, then ``top_p`` of what that leaves (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020). Tokens as likely as the last one kept are kept too, so that ties are not broken by order. Greedy rows are
    at temperature 1 and lose nothing.

    Args:
        logits: ``[n, V]``.
        samplings: of each row.

    Returns:
        float32 ``[n, V]`` in nats; ``-inf`` for tokens that are left out.
    """
    greedy = [s.temperature == 0 for s in samplings]
    temperature = [1.0 if g else s.temperature for g, s in zip(greedy, samplings, strict=True)]
    out = logits.float()
    if any(t != 1 for t in temperature):
        out = out / torch.tensor(temperature, device=logits.device).unsqueeze(1)
    out = out.log_softmax(-1)
    vocab = logits.shape[1]
    few = [i for i, s in enumerate(samplings) if 0 < s.top_k < vocab and not greedy[i]]
    if few:
        out[few] = _keep_top_k(out[few], [samplings[i].top_k for i in few])
    nucleus = [i for i, s in enumerate(samplings) if s.top_p < 1 and not greedy[i]]
    if nucleus:
        out[nucleus] = _keep_top_p(out[nucleus], [samplings[i].top_p for i in nucleus])
    return out


def _keep_top_k(logprobs: Tensor, top_k: list[int]) -> Tensor:
    largest = logprobs.topk(max(top_k), -1).values
    last = largest.gather(1, torch.tensor(top_k, device=logprobs.device).unsqueeze(1) - 1)
    return logprobs.masked_fill(logprobs < last, -torch.inf).log_softmax(-1)


def _keep_top_p(logprobs: Tensor, top_p: list[float]) -> Tensor:
    largest = logprobs.sort(-1, descending=True).values
    p = largest.double().exp()
    before = p.cumsum(-1) - p
    count = (before < torch.tensor(top_p, dtype=p.dtype, device=p.device).unsqueeze(1)).sum(-1, keepdim=True)
    return logprobs.masked_fill(logprobs < largest.gather(1, (count - 1).clamp_min(0)), -torch.inf).log_softmax(-1)


def noise_size(vocab: int) -> int:
    """How many numbers one draw from ``vocab`` tokens takes: those for a run of tokens, and those within it."""
    run = math.isqrt(vocab - 1) + 1
    return -(-vocab // run) + run


def sample_tokens(logprobs: Tensor, noise: Tensor) -> Tensor:
    """Draw a token of each row by the Gumbel-max trick (Gumbel, 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014).

    The token with the largest ``p / e`` is a draw from ``p`` if the ``e`` are independent draws from Exp(1). It is done twice: for a
    run of about ``sqrt(V)`` neighbouring tokens, with its probability, and within that run; so a draw takes ``2 sqrt(V)`` numbers
    rather than ``V``. The same noise gives the same token unless probabilities change by much: at a change of total variation ``d``,
    tokens differ in about ``2 d`` of the draws. Draws from cumulative sums would differ more, at each of the ``V`` bounds.

    Args:
        logprobs: ``[n, V]``, normalised.
        noise: float64 ``[n, noise_size(V)]``, from Exp(1). In float32 it would be so coarse near 0 that tokens less likely than 1e-7
            would be drawn too often.

    Returns:
        int64 ``[n]``.
    """
    rows, vocab = logprobs.shape
    run = math.isqrt(vocab - 1) + 1
    runs = -(-vocab // run)
    p = torch.nn.functional.pad(logprobs.exp(), (0, runs * run - vocab)).view(rows, runs, run)
    first = (p.sum(-1, dtype=torch.float64) / noise[:, :runs]).argmax(-1)
    inside = p[torch.arange(rows, device=p.device), first].double() / noise[:, runs:]
    return first * run + inside.argmax(-1)


@dataclass
class Request:
    """What has been sampled of one answer.

    Attributes:
        sampling: how.
        seed: of its noise; any integer, taken modulo 2^64.
        tokens, logprobs, versions: as in :class:`~areal.trainer.rollout.protocol.Completion`.
    """

    sampling: Sampling
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed % 2**64)

    def noise(self, size: int) -> np.ndarray:
        """The next numbers from Exp(1), float64 ``[size]``: each token takes the same count, so the ``k``-th has its own."""
        return np.maximum(-np.log1p(-self._generator.random(size)), 1e-300)

    def completion(self, finish_reason: FinishReason | None = None) -> Completion:
        """As an answer; without a reason, one that ended by itself."""
        count = len(self.versions)  # appended last: while another thread samples, the other lists may be ahead
        if finish_reason is None:
            finish_reason = "stop" if self.tokens[-1] in self.sampling.stop_token_ids else "length"
        return Completion(
            tuple(self.tokens[:count]), tuple(self.logprobs[:count]), tuple(self.versions[:count]), finish_reason
        )


class RequestSampler(ContinuousBatchingLogitsProcessorList):
    """Samples for transformers' continuous batching, in the place of its list of logits processors.

    The manager asks it once per forward with the requests in the order of the rows, and then with the scores; both on the thread that
    generates. It leaves the drawn token as the most likely one of its row, which a greedy manager takes. Asynchronous batching has
    to be off: there, the manager drops tokens after they were drawn.

    Args:
        version: of the weights.
        started: called with the name of a request that has its first token, on the thread that generates.

    Attributes:
        version: of the weights that the next forward runs with. To be changed while generation is paused.
    """

    def __init__(self, version: int, started: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.version = version
        self._started = started
        self._requests: dict[str, Request] = {}
        self._outdated: frozenset[str] = frozenset()
        self._rows: list[tuple[str, Request | None]] = []

    def add(self, name: str, request: Request) -> None:
        """Know a request before the manager gets it."""
        self._requests[name] = request

    def remove(self, name: str) -> None:
        """Forget a request. If it still runs, its tokens are of no interest."""
        self._requests.pop(name, None)

    def keep_private(self, names: Sequence[str]) -> None:
        """Keys and values of these requests come from older weights: from now on they are not offered to other requests."""
        self._outdated = self._outdated.intersection(self._requests).union(names)

    def prepare_tensor_args(self, requests_in_batch: list[FutureRequestState], arg_storage: Tensor) -> Tensor:
        for future in requests_in_batch:
            if future.state.request_id in self._outdated:
                future.complete_blocks = {}  # the manager registers these for sharing after the forward
        names = [future.state.request_id for future in requests_in_batch if future.has_new_token]
        self._rows = [(name, self._requests.get(name)) for name in names]
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Draw.

        Args:
            scores: float32 ``[m, V]``; rows after those of the requests mean nothing. Overwritten.

        Raises:
            RuntimeError: a log-prob is not finite.
        """
        live = [(row, name, request) for row, (name, request) in enumerate(self._rows) if request is not None]
        if live:
            rows, names, requests = zip(*live, strict=True)
            tokens, logprobs = self._sample(scores[list(rows)], requests)
            scores[list(rows), tokens] = torch.inf
            for name, request, token, logprob in zip(names, requests, tokens.tolist(), logprobs.tolist(), strict=True):
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.versions.append(self.version)
                if len(request.versions) == 1:
                    self._started(name)
        return scores

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        samplings = [request.sampling for request in requests]
        logprobs = log_probs(logits, samplings)
        size = noise_size(logits.shape[1])
        greedy = [sampling.temperature == 0 for sampling in samplings]
        noise = np.stack([np.ones(size) if g else r.noise(size) for g, r in zip(greedy, requests, strict=True)])
        tokens = sample_tokens(logprobs, torch.from_numpy(noise).to(logits.device))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        if not bool(chosen.isfinite().all()):
            raise RuntimeError(
                f"a sampled token has the log-prob {chosen[~chosen.isfinite()][0].item()}: the logits of version {self.version} are "
                "not finite, so its weights are broken"
            )
        return tokens, chosen
