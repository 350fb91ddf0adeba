"""Log-probs of given tokens, by forwards without generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from areal.engine.model.heads import decoder_of, replaced_decoder
from areal.inference.local.adapter_router import AdapterRouter
from areal.inference.local.sampler import log_probs, top_tokens
from areal.inference.local.served_adapters import ServedAdapter
from areal.inference.protocol import Sampling, TopTokens


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probs of the tokens of a prompt after the first one, in nats.

    Attributes:
        logprobs: one for each token but the first.
        top: the most likely tokens in their places; empty if none were asked for.
    """

    logprobs: tuple[float, ...]
    top: tuple[TopTokens, ...] = ()


@dataclass(frozen=True)
class _Prompt:
    """A prompt to score. Of ``sampling``, temperature, ``top_p``, ``top_k`` and ``top_logprobs`` are read."""

    tokens: Sequence[int]
    sampling: Sampling
    adapter: ServedAdapter | None
    future: Future[PromptLogprobs] = field(default_factory=Future)


class PromptScorer:
    """Computes log-probs of prompts, together those that wait at the same time.

    Args:
        model: in evaluation mode. Its attention may be that of continuous batching.
        router: applies adapters to the model.
        max_batch_tokens: maximum number of tokens of a forward with several prompts, and of rows of logits at once.
        paused: context in which no other forward runs. Entering it may raise.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        router: AdapterRouter,
        max_batch_tokens: int,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model, self._router, self._paused = model, router, paused
        self._most = max_batch_tokens
        self._lock = threading.Lock()
        self._waiting: list[_Prompt] = []
        # One thread, which exists from the first prompt on.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout-prompts")

    def submit(
        self, tokens: Sequence[int], sampling: Sampling, adapter: ServedAdapter | None
    ) -> Future[PromptLogprobs]:
        """Score a prompt, under the distribution from which ``sampling`` draws. Returns the future of its log-probs."""
        prompt = _Prompt(tokens, sampling, adapter)
        with self._lock:
            self._waiting.append(prompt)
        self._pool.submit(self._score_waiting)
        return prompt.future

    def close(self) -> None:
        """Release the thread. Prompts that wait are scored, or fail, before."""
        self._pool.shutdown()

    def _score_waiting(self) -> None:
        """Score all prompts that wait by now, the short ones first. Runs in the pool."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        waiting.sort(key=lambda prompt: len(prompt.tokens))
        while waiting:
            # Prompts are padded to the longest of their forward.
            count = 1
            while count < len(waiting) and (count + 1) * len(waiting[count].tokens) <= self._most:
                count += 1
            self._score_together(waiting[:count])
            del waiting[:count]

    def _score_together(self, prompts: Sequence[_Prompt]) -> None:
        """Resolve the futures of prompts by one forward."""
        live = [prompt for prompt in prompts if not prompt.future.cancelled()]
        if not live:
            return
        try:
            with self._paused():
                results: Sequence[PromptLogprobs | Exception] = self._compute(live)
        except Exception as error:
            # Too little memory for all of them may be enough for each.
            if len(live) > 1:
                for prompt in live:
                    self._score_together([prompt])
                return
            results = [error]
        for prompt, result in zip(live, results, strict=True):
            if not prompt.future.set_running_or_notify_cancel():
                continue
            if isinstance(result, PromptLogprobs):
                prompt.future.set_result(result)
            else:
                prompt.future.set_exception(result)

    @torch.no_grad()
    def _compute(self, prompts: Sequence[_Prompt]) -> list[PromptLogprobs]:
        """Return the log-probs of prompts, by one forward. Logits are computed for a few positions of all prompts at a time."""
        # Padding follows the tokens, which attend only to earlier ones.
        length = max(len(prompt.tokens) for prompt in prompts)
        rows = [[*prompt.tokens, *[0] * (length - len(prompt.tokens))] for prompt in prompts]
        ids = torch.tensor(rows, device=self._model.device)
        adapters = [prompt.adapter for prompt in prompts]
        chosen: list[list[float]] = [[] for _ in prompts]
        top: list[list[TopTokens]] = [[] for _ in prompts]
        step = max(1, self._most // len(prompts))
        with _plain_attention(self._model), _hidden_once(self._model) as select:
            # The last position predicts a token that is not given.
            for start in range(0, length - 1, step):
                stop = min(start + step, length - 1)
                select(slice(start, stop))
                with self._router.sequences(adapters, length, stop - start):
                    logits = self._model(input_ids=ids, use_cache=False).logits
                for i, prompt in enumerate(prompts):
                    count = min(stop, len(prompt.tokens) - 1) - start
                    if count > 0:
                        logprobs = log_probs(logits[i, :count].float(), [prompt.sampling] * count)
                        chosen[i] += logprobs.gather(1, ids[i, start + 1 : start + count + 1, None]).squeeze(1).tolist()
                        top[i] += top_tokens(logprobs, prompt.sampling.top_logprobs)
        return [PromptLogprobs(tuple(a), tuple(b)) for a, b in zip(chosen, top, strict=True)]


@contextmanager
def _hidden_once(model: PreTrainedModel) -> Iterator[Callable[[slice], None]]:
    """Context in which the layers of a model run in its first forward only, and its head reads some of their positions.

    All forwards must have the same input. Yields a function that sets the positions of the next forwards, whose logits are
    ``[n, stop - start, V]``.
    """
    forward = decoder_of(model).forward
    positions, output = slice(None), None

    def select(chosen: slice) -> None:
        nonlocal positions
        positions = chosen

    def selected(*args: Any, **kwargs: Any) -> Any:
        nonlocal output
        if output is None:
            output = forward(*args, **kwargs)
        return replace(output, last_hidden_state=output.last_hidden_state[:, positions])

    with replaced_decoder(model, selected):
        yield select


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model attends without the paged cache."""
    paged = model.config._attn_implementation
    model.set_attn_implementation(paged.removeprefix("paged|"))
    try:
        yield
    finally:
        model.set_attn_implementation(paged)
