"""Requests for answers in vLLM's format, and what its replies mean in that of the protocol."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence

import numpy as np

from areal.inference.http.servers.http_call import HTTPCall
from areal.inference.http.servers.vllm_schemas import VLLMChoice, VLLMCompleted, VLLMCompletion
from areal.inference.protocol import Sampling
from areal.tinker.backends.prepared import SampledAnswer, SamplingRequest, TopLogprobs

MIN_TEMPERATURE = 0.01
"""Smallest temperature above 0. The server raises smaller ones to it."""

_EXCLUDED = -9999.0
"""Log-prob that the server writes for ``-inf``."""

_ID_PREFIX = "token_id:"


def check_supported(request: SamplingRequest) -> None:
    """Raise a ``ValueError`` if a request asks for what the server cannot compute."""
    if (request.prompt_logprobs or request.prompt_top_k) and request.temperature not in (0.0, 1.0):
        raise ValueError(
            f"temperature = {request.temperature} with log-probs of the prompt: the server computes those at temperature 1 only; "
            "ask for them in a request of their own at temperature 1"
        )
    if request.max_tokens == 0:
        raise ValueError(
            f"prompt has {len(request.prompt)} tokens, which fill the context: the server scores a prompt with room for one more token"
        )


def completion_call(
    model: str, request: SamplingRequest, sampling: Sampling, *, scored: bool
) -> HTTPCall[VLLMCompleted]:
    """Return the request for one answer.

    Args:
        model: name of the model or adapter on the server.
        request: request that the answer belongs to.
        sampling: parameters of the answer, with its seed.
        scored: whether to ask for the log-probs of the prompt, too.
    """
    greedy = sampling.temperature == 0
    body = VLLMCompletion(
        model=model,
        prompt=list(request.prompt),
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        # Greedy answers have the log-probs of temperature 1 over all tokens.
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids or ()),
        ignore_eos=sampling.stop_token_ids is not None,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        logprobs=sampling.top_logprobs,
        prompt_logprobs=request.prompt_top_k if scored else None,
        stop=list(sampling.stop) or None,
        return_tokens_as_token_ids=True,
        request_id=uuid.uuid4().hex,
    )
    return HTTPCall("/v1/completions", body, VLLMCompleted)


def read_answer(choice: VLLMChoice, top_k: int, vocab_size: int) -> SampledAnswer:
    """Return the answer in a reply.

    Raises:
        ValueError: lengths do not fit, or the server ended the request.
    """
    if choice.finish_reason == "abort":
        raise ValueError("the answer was aborted")
    logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
    if len(logprobs) != len(choice.token_ids):
        raise ValueError(f"{len(choice.token_ids)} tokens came with {len(logprobs)} log-probs")
    top = None
    if top_k:
        rows = [] if choice.logprobs is None else choice.logprobs.top_logprobs or []
        if len(rows) != len(choice.token_ids):
            raise ValueError(f"{len(choice.token_ids)} tokens came with top_logprobs of {len(rows)}")
        top = _top([_by_id(row) for row in rows], min(top_k, vocab_size))
    return SampledAnswer(choice.finish_reason, np.array(choice.token_ids, np.int32), _floats(logprobs), top)


def read_prompt(choice: VLLMChoice, request: SamplingRequest, vocab_size: int) -> tuple[np.ndarray, TopLogprobs | None]:
    """Return the log-probs of the prompt in a reply, NaN for the first token, and the most likely tokens if they were asked for.

    Raises:
        ValueError: a position or its token is missing.
    """
    rows = choice.prompt_logprobs or []
    if len(rows) != len(request.prompt):
        raise ValueError(f"a prompt of {len(request.prompt)} tokens came with prompt_logprobs of {len(rows)}")
    positions = [{token: each.logprob for token, each in (row or {}).items()} for row in rows[1:]]
    if any(token not in row for token, row in zip(request.prompt[1:], positions, strict=True)):
        raise ValueError("prompt_logprobs lacks a token of the prompt")
    of_tokens = [row[token] for token, row in zip(request.prompt[1:], positions, strict=True)]
    scores = np.concatenate([np.full(1, np.nan, np.float32), _floats(of_tokens)])
    if not request.prompt_top_k:
        return scores, None
    width = min(request.prompt_top_k, vocab_size)
    rest = _top(positions, width)
    ids = np.concatenate([np.zeros((1, width), np.int32), rest.ids])
    return scores, TopLogprobs(ids, np.concatenate([np.full((1, width), np.nan, np.float32), rest.logprobs]))


def _by_id(row: Mapping[str, float]) -> dict[int, float]:
    if not all(key.startswith(_ID_PREFIX) for key in row):
        raise ValueError("top_logprobs has texts in place of token ids: the release of the server is not supported")
    return {int(key.removeprefix(_ID_PREFIX)): value for key, value in row.items()}


def _top(rows: Sequence[Mapping[int, float]], width: int) -> TopLogprobs:
    """Return the most likely tokens of each position. A row may have one more: the token of the text."""
    ordered = [sorted(row.items(), key=lambda entry: -entry[1])[:width] for row in rows]
    if any(len(row) < width for row in ordered):
        raise ValueError(f"a position has fewer than {width} most likely tokens")
    ids = np.array([[token for token, _ in row] for row in ordered], np.int32).reshape(-1, width)
    return TopLogprobs(ids, _floats([[value for _, value in row] for row in ordered]).reshape(-1, width))


def _floats(values: Sequence[float] | Sequence[Sequence[float]]) -> np.ndarray:
    array = np.array(values, np.float32)
    return np.where(array <= _EXCLUDED, np.float32(-np.inf), array)
