"""Sampling in this process, with the rollout's generator. Entry point ``local`` of the group ``areal.tinker_samplers``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from areal.engine.lora.adapter_set import peft_format
from areal.engine.model.hub import max_positions
from areal.inference.local.prompt_logprobs import PromptLogprobs
from areal.inference.local.rollout import LocalRollout
from areal.inference.protocol import Completion, Sampling, TopTokens
from areal.inference.together import gather_or_cancel
from areal.tinker.backends.backend import ModelLimits, SamplingFactory
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SampledAnswer, SamplingRequest, SamplingResult, TopLogprobs
from areal.tinker.backends.sampling.sampler_config import (
    LocalSamplerConfig,
    check_adapter_base,
    checked_sampling,
    with_seeds,
)

_MOST_CONTEXT, _CACHE_TOKENS = 8192, 32768
"""Defaults of ``max_context`` and of ``cache_tokens``."""

_BATCH_TOKENS = {"cpu": 256}
"""Default of ``max_batch_tokens`` by type of device: sdpa on a CPU attends over all sequences of a forward."""
_BATCH_TOKENS_OF_OTHERS = 2048

_MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0. Logits overflow at much smaller ones."""

_EMPTY = SampledAnswer("length", np.empty(0, np.int32), np.empty(0, np.float32))
"""Answer to a request that only scores its prompt."""

_PROBE_TOKENS = 16
"""Tokens of the forward that checks a new adapter."""


class LocalSampler:
    """Implements :class:`~areal.tinker.backends.backend.SamplingBackend`.

    Args:
        rollout: generator, which this object closes.
        model: directory or hub name of the base model.
        settings: limits of a request are read.
    """

    def __init__(self, rollout: LocalRollout, model: str, settings: LocalSamplerConfig) -> None:
        self.rollout, self._model, self._settings = rollout, model, settings
        config = rollout.model.config.get_text_config()
        self._limits = ModelLimits(config.vocab_size, rollout.max_context, max_rank=config.hidden_size)
        self._served: dict[str, str | None] = {}  # snapshot -> its adapter; None: the model itself
        self._numbers = itertools.count()
        self._opening = asyncio.Lock()

    @classmethod
    def create(cls, model: str, config: Mapping[str, Any]) -> LocalSampler:
        """Load a model, and start its generator.

        Args:
            model: directory or hub name.
            config: fields of :class:`~areal.tinker.backends.sampling.sampler_config.LocalSamplerConfig`.

        Raises:
            ValueError: a setting is unknown or out of range, the model cannot be read, or peft is not installed.
        """
        settings = LocalSamplerConfig.checked(config)
        peft_format()  # takes seconds, which the first snapshot must not wait for
        device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        try:
            network: Any = AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, attn_implementation=settings.attention
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"model = {model!r} cannot be read: {error}") from error
        # Sizes that are not given follow from the model and the device.
        positions = max_positions(network.config) or _MOST_CONTEXT
        context = settings.max_context or min(positions, _MOST_CONTEXT)
        rollout = LocalRollout(
            network.to(device).eval(),
            max_context=context,
            max_requests=settings.max_requests,
            cache_tokens=settings.cache_tokens or max(context + settings.page_size, _CACHE_TOKENS),
            page_size=settings.page_size,
            max_batch_tokens=settings.max_batch_tokens or _BATCH_TOKENS.get(device.type, _BATCH_TOKENS_OF_OTHERS),
            tokenizer=_tokenizer(model),
        )
        return cls(rollout, model, settings)

    def limits(self) -> ModelLimits:
        """Return the sizes against which requests are checked."""
        return self._limits

    def borrow(self, parameters: Mapping[str, torch.Tensor]) -> int:
        """Use these parameters of the base model in place of its own, where they are alike. Returns their bytes."""
        borrowed = 0
        for name, own in self.rollout.model.named_parameters():
            other = parameters.get(name)
            if other is not None and (other.shape, other.dtype, other.device) == (own.shape, own.dtype, own.device):
                own.data = other
                borrowed += other.nbytes
        return borrowed

    async def open(self, snapshot: str, folder: Path | None) -> None:
        """Serve the adapter in ``folder``, or the base model for ``None``, under the name ``snapshot``."""
        async with self._opening:
            if snapshot not in self._served:
                self._served[snapshot] = None if folder is None else await self._add(snapshot, folder)

    async def release(self, snapshot: str) -> None:
        """Stop serving a snapshot, and free its weights once running requests have ended. Does nothing if it is not served."""
        async with self._opening:
            adapter = self._served.pop(snapshot, None)
            if adapter is not None:
                self.rollout.remove_adapter(adapter)

    async def sample(self, snapshot: str, request: SamplingRequest) -> SamplingResult:
        """Return the answers to a request. Cancelling the task ends its generation.

        A generator that has failed is started again.
        """
        if snapshot not in self._served:
            raise UserError(f"snapshot {snapshot!r} is not served any more: create another sampling client")
        adapter = self._served[snapshot]
        try:
            sampling = checked_sampling(request, self._limits, self._settings, _MIN_TEMPERATURE)
            if not self.rollout.serving:
                await asyncio.to_thread(self.rollout.restart)
            seeded = with_seeds(sampling, request) if request.max_tokens != 0 else []
            work: list[Any] = [self.rollout.generate(request.prompt, each, adapter) for each in seeded]
            if request.prompt_logprobs or request.prompt_top_k:
                work.append(self._score(request, sampling, adapter))
            results = await gather_or_cancel(work)
        except ValueError as error:
            raise UserError(str(error)) from error
        except RuntimeError as error:
            raise ServerError(f"sampling failed, send the request again: {error}") from error
        completions = [each for each in results if isinstance(each, Completion)]
        scores = [each for each in results if isinstance(each, PromptLogprobs)]
        # A generator that is closed ends answers with their tokens so far.
        if any(each.finish_reason == "aborted" for each in completions):
            raise ServerError("the server is stopping: send the request again when it is back")
        if not all(np.isfinite(each.logprobs).all() for each in scores):
            raise UserError("the log-probs of the prompt are not finite: the weights have diverged")
        answers = [_answer(each, request.sample_top_k) for each in completions] or [_EMPTY] * request.num_samples
        if not scores:
            return SamplingResult(answers)
        return SamplingResult(
            answers,
            np.array([np.nan, *scores[0].logprobs], np.float32) if request.prompt_logprobs else None,
            _top(scores[0].top, request.prompt_top_k, first=True) if request.prompt_top_k else None,
        )

    def healthy(self) -> bool:
        """Return whether the next call can succeed."""
        return self.rollout.serving

    async def close(self) -> None:
        """End generation. May be called twice."""
        await asyncio.to_thread(self.rollout.close)

    async def _add(self, snapshot: str, folder: Path) -> str:
        """Add the adapter in a folder to the generator. Returns its name there.

        Raises:
            UserError: the folder is damaged or of another base model, or the adapter has diverged.
            ServerError: memory is short, or generation failed.
        """
        name = f"{snapshot} {next(self._numbers)}"
        read = asyncio.ensure_future(asyncio.to_thread(self._read, name, folder))
        try:
            await asyncio.shield(read)
            finite = await self._is_finite(name)
        except (ValueError, OSError, RuntimeError) as error:
            self._forget(name)
            raise _refusal(error, len(self._served)) from error
        except asyncio.CancelledError:
            # The thread goes on.
            read.add_done_callback(lambda _: self._forget(name))
            raise
        if not finite:
            self._forget(name)
            raise UserError(
                "the weights cannot be sampled from: their log-probs are not finite. Training has diverged: go back to an earlier checkpoint"
            )
        return name

    def _forget(self, name: str) -> None:
        if name in self.rollout.adapters:
            self.rollout.remove_adapter(name)

    def _read(self, name: str, folder: Path) -> None:
        check_adapter_base(folder, self._model)
        if not self.rollout.serving:
            self.rollout.restart()
        self.rollout.add_adapter(name, folder)

    async def _is_finite(self, name: str) -> bool:
        """Return whether an adapter gives finite log-probs. One that does not could break answers of others in the same forward."""
        tokens = range(min(_PROBE_TOKENS, self._limits.vocab_size, self._limits.max_tokens - 1))
        result = await self.rollout.prompt_logprobs(tokens, Sampling(), name)
        return bool(np.isfinite(result.logprobs).all())

    async def _score(self, request: SamplingRequest, sampling: Sampling, adapter: str | None) -> PromptLogprobs:
        """Return log-probs of the prompt at the request's temperature, over all tokens: those that ``top_k`` excludes are scored, too."""
        scored = Sampling(temperature=sampling.temperature, top_logprobs=request.prompt_top_k)
        return await self.rollout.prompt_logprobs(request.prompt, scored, adapter)


create: SamplingFactory = LocalSampler.create
"""Entry point."""


def _tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model; ``None`` without one, so that requests with stop strings are refused."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None
    # For some families, transformers makes a tokenizer without files, which has special tokens only.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


def _refusal(error: ValueError | OSError | RuntimeError, served: int) -> UserError | ServerError:
    """Return the error of an adapter that was not added, by who can mend it.

    Args:
        served: number of snapshots that are served.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return ServerError(
            f"no device memory for one more snapshot, after {served}: close sampling sessions, and try again"
        )
    if isinstance(error, RuntimeError):
        return ServerError(f"the sampler cannot load weights, try again: {error}")
    return UserError(f"the weights cannot be sampled from: {error}")


def _answer(completion: Completion, top_k: int) -> SampledAnswer:
    return SampledAnswer(
        "stop" if completion.finish_reason == "stop" else "length",
        np.array(completion.tokens, np.int32),
        np.array(completion.logprobs, np.float32),
        _top(completion.top, top_k, first=False) if top_k else None,
    )


def _top(rows: Sequence[TopTokens], count: int, *, first: bool) -> TopLogprobs:
    """Return the most likely tokens as arrays.

    Args:
        rows: tokens of each position.
        count: number that was asked for. A smaller vocabulary has fewer.
        first: whether to put a position without a distribution before them.
    """
    width = len(rows[0].ids) if rows else count
    ids, logprobs = (np.array([getattr(row, name) for row in rows]) for name in ("ids", "logprobs"))
    ids, logprobs = ids.reshape(-1, width), logprobs.reshape(-1, width)
    if first:
        ids = np.concatenate([np.zeros((1, width)), ids])
        logprobs = np.concatenate([np.full((1, width), np.nan), logprobs])
    return TopLogprobs(ids.astype(np.int32), logprobs.astype(np.float32))
