"""Validation of values, and of sampling requests. Each refusal is a :class:`UserError`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal.tinker.backends.backend import ModelLimits
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import SamplingRequest
from areal.tinker.service.requests import RawChunk, Sample
from areal.tinker.service.settings import ServiceLimits, ServiceSettings

_SAMPLING_KEYS = {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
MAX_INTEGER = 2**63 - 1
_MAX_METADATA = 2**18
_ID = re.compile(r"[A-Za-z0-9_:-]{1,128}", re.ASCII)


def check_number(name: str, value: Any) -> float:
    """Return a finite number, which is not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}: it must be a finite number")
    return float(value)


def check_integer(name: str, value: Any, lowest: int, highest: int = MAX_INTEGER) -> int:
    """Return an integer in ``[lowest, highest]``."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise UserError(f"{name} is {value!r}: it must be an integer from {lowest} to {highest}")
    return value


def check_keys(name: str, given: Any, known: set[str] | frozenset[str]) -> None:
    """Refuse keys that nothing reads."""
    unknown = sorted(map(str, set(given) - known))
    if unknown:
        raise UserError(f"{name} has the unknown keys {unknown}: supported are {sorted(known)}")


def is_id(value: Any) -> bool:
    """Return whether a session, a model or a request may have this id."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def check_page(limit: Any, offset: Any) -> tuple[int, int]:
    """Return limit and offset of a listing."""
    return check_integer("limit", limit, 0, 10_000), check_integer("offset", offset, 0)


def check_metadata(value: Any) -> dict[str, Any] | None:
    """Return user metadata, which the database stores as JSON."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"user_metadata is no JSON value: {error}") from error
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"user_metadata is {text[:200]}: it must be an object")
    if len(text) > _MAX_METADATA:
        raise UserError(f"user_metadata has {len(text)} characters: at most {_MAX_METADATA} are supported")
    return None if value is None else dict(value)


def check_base_model(base_model: str, settings: ServiceSettings) -> str:
    """Return the canonical name of a base model."""
    if base_model not in settings.base_models:
        raise UserError(f"base_model is {base_model!r}: this server trains {', '.join(settings.base_models)}")
    return settings.base_models[0]


def check_tokens(chunks: Sequence[RawChunk], name: str) -> np.ndarray:
    """Return the token ids of a model input as one int64 array."""
    for chunk in chunks:
        if chunk.kind != "encoded_text" or chunk.tokens is None:
            raise UserError(f"{name} has a chunk of kind {chunk.kind!r}: the base model reads text only (encoded_text)")
    if len(chunks) == 1 and chunks[0].tokens is not None:
        return np.asarray(chunks[0].tokens, dtype=np.int64).reshape(-1)
    parts = [np.asarray(chunk.tokens, dtype=np.int64).reshape(-1) for chunk in chunks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def check_sampling(request: Sample, limits: ModelLimits, settings: ServiceLimits) -> SamplingRequest:
    """Return a validated sampling request."""
    prompt = check_tokens(request.prompt, "prompt")
    if not len(prompt):
        raise UserError("prompt is empty: it must have at least one token")
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        raise UserError(
            f"prompt has token ids from {prompt.min()} to {prompt.max()}: they must be from 0 to {limits.vocab_size - 1}"
        )
    params = dict(request.sampling_params)
    check_keys("sampling_params", params, _SAMPLING_KEYS)
    # The prompt and one token must fit; a longer answer than fits is refused where the client names its length.
    room = limits.max_tokens - len(prompt)
    max_tokens = params.get("max_tokens")
    if max_tokens is not None:
        check_integer("sampling_params.max_tokens", max_tokens, 1)
    # Clients score a prompt by asking for one token. A prompt that fills the context is scored only.
    scored = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
    if room == 0 and max_tokens == 1 and scored:
        params["max_tokens"] = max_tokens = 0
    elif room < (max_tokens or 1):
        raise UserError(
            f"prompt has {len(prompt)} tokens and sampling_params.max_tokens is {max_tokens}: "
            f"together at most {limits.max_tokens} are supported"
        )
    strings, ids = _stops(params.get("stop"), limits)
    values = {key: value for key, value in params.items() if value is not None}
    temperature = check_number("sampling_params.temperature", values.get("temperature", 1.0))
    top_p = check_number("sampling_params.top_p", values.get("top_p", 1.0))
    top_k = check_integer("sampling_params.top_k", values.get("top_k", -1), -1)
    if temperature < 0:
        raise UserError(f"sampling_params.temperature is {temperature}: it must be at least 0")
    if not 0 < top_p <= 1:
        raise UserError(f"sampling_params.top_p is {top_p}: it must be in (0, 1]")
    if top_k == 0:
        raise UserError("sampling_params.top_k is 0: it must be at least 1, or -1 for all tokens")
    seed = params.get("seed")
    if seed is not None:
        check_integer("sampling_params.seed", seed, -MAX_INTEGER)
    _check_logprobs(request, len(prompt), limits, settings)
    return SamplingRequest(
        prompt=prompt.tolist(),
        num_samples=check_integer("num_samples", request.num_samples, 1, settings.max_num_samples),
        max_tokens=max_tokens,
        seed=seed,
        stop_strings=strings,
        stop_token_ids=ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_top_k=request.topk_prompt_logprobs,
        sample_top_k=request.topk_sample_logprobs,
    )


def _stops(stop: Any, limits: ModelLimits) -> tuple[tuple[str, ...] | None, tuple[int, ...] | None]:
    """Strings and token ids of a stop: a string, strings, ids, ``None`` for the model's own, or ``[]`` for no end at all."""
    if stop is None:
        return None, None
    if isinstance(stop, str):
        stop = [stop]
    items = list(stop) if isinstance(stop, Sequence | np.ndarray) and not isinstance(stop, bytes) else None
    if items is not None and all(isinstance(item, str) and item for item in items) and items:
        return tuple(items), None
    if items is not None and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        for item in items:
            check_integer("sampling_params.stop", item, 0, limits.vocab_size - 1)
        return None, tuple(items)
    raise UserError(
        f"sampling_params.stop is {stop!r}: give a string, strings that are not empty, token ids, [] or null"
    )


def _check_logprobs(request: Sample, length: int, limits: ModelLimits, settings: ServiceLimits) -> None:
    """Check which log-probs a request asks for."""
    most = min(settings.max_top_k, limits.vocab_size)
    check_integer("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, most)
    check_integer("topk_sample_logprobs", request.topk_sample_logprobs, 0, most)
    if request.target_prompt_logprobs is not None:
        raise UserError("target_prompt_logprobs is not supported: use prompt_logprobs or topk_prompt_logprobs")
    if request.prompt_logprobs_last_n is not None:
        if not request.prompt_logprobs:
            raise UserError("prompt_logprobs_last_n is given without prompt_logprobs: set prompt_logprobs")
        check_integer("prompt_logprobs_last_n", request.prompt_logprobs_last_n, 1, max(1, length - 1))
