"""Requests and replies of the two servers, as far as they are used here.

Written down from the projects' public documentation and sources:

* SGLang, main at ``067bfe93`` (``docs/advanced_features/sglang_for_rl.md``: updates from disk, pause, continue), ``001067ff``
  (``managers/io_struct.py``: their fields and those of ``/generate``), ``0a0dd359`` (``docs/basic_usage/sampling_params.md``), ``0025436e``
  (``entrypoints/http_server.py``: replies of pause and continue, ``/abort_request``).
* vLLM, v0.32.0 and main at ``006ebac2`` (``docs/training/async_rl.md``: ``/pause``, ``/resume``), ``002032ee``
  (``entrypoints/openai/completion/protocol.py``: ``/v1/completions``), ``0100a212`` (``entrypoints/serve/dev/rlhf/api_router.py``),
  ``055e47c2`` (``entrypoints/serve/dev/rpc/api_router.py``: ``/collective_rpc``).

A request has exactly these fields. A reply may have more; what is missing or of another type is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, strict=True)]
LogProb = Annotated[float, Field(allow_inf_nan=False)]


class RequestBody(BaseModel):
    """What is sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ReplyBody(BaseModel):
    """What comes back."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Empty(RequestBody):
    """``{}``, for routes that take nothing."""


class Anything(ReplyBody):
    """A reply of which nothing is used but that it came."""


# ---- SGLang


class SGLangSampling(RequestBody):
    """``sampling_params`` of ``/generate``. What is left out would be taken from the model's ``generation_config.json``."""

    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=-1)
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[TokenId]
    ignore_eos: bool
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    sampling_seed: int = Field(ge=0)


class SGLangGenerate(RequestBody):
    """``POST /generate``."""

    rid: str
    input_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SGLangSampling
    return_logprob: Literal[True] = True
    logprob_start_len: int = -1
    stream: Literal[False] = False


class SGLangFinish(ReplyBody):
    """``meta_info.finish_reason``. ``message`` says why a request was aborted."""

    type: Literal["stop", "length", "abort"]
    message: str | None = None


class SGLangMeta(ReplyBody):
    """``meta_info``. ``output_token_logprobs`` has for each token its log-prob, its id, and its text or nothing; an aborted request may come
    without. ``weight_version`` is the label that was given with the last update, ``"default"`` before.
    """

    finish_reason: SGLangFinish
    output_token_logprobs: list[tuple[LogProb, TokenId, str | None]] | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None


class SGLangGenerated(ReplyBody):
    """ReplyBody of ``/generate`` to one prompt."""

    meta_info: SGLangMeta


class SGLangPause(RequestBody):
    """``POST /pause_generation``: ``"abort"`` sends back what is under way, with what there is of it."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class SGLangUpdateFromDisk(RequestBody):
    """``POST /update_weights_from_disk``."""

    model_path: str
    weight_version: str
    flush_cache: bool = True
    abort_all_requests: bool = False


class SGLangUpdated(ReplyBody):
    """ReplyBody of ``/update_weights_from_disk``, with status 400 if it was no success."""

    success: bool
    message: str


class SGLangAbort(RequestBody):
    """``POST /abort_request``."""

    rid: str
    abort_all: bool = False


# ---- vLLM


class VLLMCompletion(RequestBody):
    """``POST /v1/completions`` with a prompt of token ids. What is left out would be taken from the model's ``generation_config.json``.

    ``logprobs = 0`` asks for those of the sampled tokens alone.
    """

    model: str | None = None
    prompt: list[TokenId] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[TokenId]
    ignore_eos: Literal[True] = True
    seed: int = Field(ge=0, lt=2**63)
    n: Literal[1] = 1
    logprobs: Literal[0] = 0
    return_token_ids: Literal[True] = True
    add_special_tokens: Literal[False] = False
    skip_special_tokens: bool = False
    request_id: str


class VLLMLogProbs(ReplyBody):
    """``choices[].logprobs``."""

    token_logprobs: list[LogProb]


class VLLMChoice(ReplyBody):
    """``choices[]``. A request that was aborted before its first token may come without log-probs."""

    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[TokenId]
    logprobs: VLLMLogProbs | None


class VLLMCompleted(ReplyBody):
    """ReplyBody of ``/v1/completions``."""

    choices: list[VLLMChoice] = Field(min_length=1, max_length=1)


class VLLMPaused(ReplyBody):
    """ReplyBody of ``POST /pause?mode=abort``."""

    status: Literal["paused"]


class VLLMResumed(ReplyBody):
    """ReplyBody of ``POST /resume``."""

    status: Literal["resumed"]


class VLLMReloadArguments(RequestBody):
    """Arguments of the workers' method ``reload_weights``: the directory to load from in place of the model's own."""

    weights_path: str


class VLLMReload(RequestBody):
    """``POST /collective_rpc``: a method of every worker."""

    method: Literal["reload_weights"] = "reload_weights"
    kwargs: VLLMReloadArguments


class VLLMReloaded(ReplyBody):
    """ReplyBody of ``/collective_rpc``: what the method returned on each worker, which is nothing for ``reload_weights``."""

    results: list[None]
