"""Schemas of the requests and replies of SGLang and vLLM that this package uses.

Taken from the projects' public documentation and sources:

* SGLang, main at ``067bfe93`` (``docs/advanced_features/sglang_for_rl.md``: updates from disk, pause, continue,
  release and resume of memory), ``001067ff``
  (``managers/io_struct.py``: their fields and those of ``/generate``), ``0a0dd359`` (``docs/basic_usage/sampling_params.md``), ``0025436e``
  (``entrypoints/http_server.py``: replies of pause and continue, ``/abort_request``).
* vLLM, v0.32.0 and main at ``006ebac2`` (``docs/training/async_rl.md``: ``/pause``, ``/resume``; ``docs/features/sleep_mode.md``: ``/sleep``,
  ``/wake_up``), ``002032ee``
  (``entrypoints/openai/completion/protocol.py``: ``/v1/completions``), ``0100a212`` (``entrypoints/serve/dev/rlhf/api_router.py``),
  ``055e47c2`` (``entrypoints/serve/dev/rpc/api_router.py``: ``/collective_rpc``).

A request has exactly these fields. A reply may have more. A field that is missing or of another type is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, strict=True)]
LogProb = Annotated[float, Field(allow_inf_nan=False)]


class RequestBody(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ReplyBody(BaseModel):
    """Body of a reply."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Empty(RequestBody):
    """``{}``, for routes without arguments."""


class Anything(ReplyBody):
    """A reply whose content is not used."""


# ---- SGLang


class SGLangSampling(RequestBody):
    """``sampling_params`` of ``/generate``. Fields left out would be taken from the model's ``generation_config.json``."""

    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=-1)
    # Neutral values, sent explicitly: any other would change the distribution that log-probs refer to.
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[TokenId]
    ignore_eos: bool
    # Return every sampled token, including special and stop tokens.
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    sampling_seed: int = Field(ge=0)


class SGLangGenerate(RequestBody):
    """``POST /generate``."""

    rid: str
    input_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SGLangSampling
    # Log-probs of the sampled tokens only, not of the prompt.
    return_logprob: Literal[True] = True
    logprob_start_len: int = -1
    stream: Literal[False] = False


class SGLangFinish(ReplyBody):
    """``meta_info.finish_reason``. ``message``: reason of an abort."""

    type: Literal["stop", "length", "abort"]
    message: str | None = None


class SGLangMeta(ReplyBody):
    """``meta_info``. ``output_token_logprobs`` has log-prob, id and optional text of each token; an aborted request may lack it.
    ``weight_version`` is the label of the last update, ``"default"`` before the first.
    """

    finish_reason: SGLangFinish
    output_token_logprobs: list[tuple[LogProb, TokenId, str | None]] | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None


class SGLangGenerated(ReplyBody):
    """Reply of ``/generate`` to one prompt."""

    meta_info: SGLangMeta


class SGLangPause(RequestBody):
    """``POST /pause_generation``: ``"abort"`` returns running requests with their tokens so far."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class SGLangUpdateFromDisk(RequestBody):
    """``POST /update_weights_from_disk``."""

    model_path: str
    weight_version: str
    # Keys and values of the old weights must not be reused.
    flush_cache: bool = True
    abort_all_requests: bool = False


class SGLangUpdated(ReplyBody):
    """Reply of ``/update_weights_from_disk``, with status 400 on failure."""

    success: bool
    message: str


class SGLangMemory(RequestBody):
    """``POST /release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: tuple[Literal["kv_cache", "weights"], ...] = ("kv_cache", "weights")


class SGLangAbort(RequestBody):
    """``POST /abort_request``."""

    rid: str
    abort_all: bool = False


# ---- vLLM


class VLLMCompletion(RequestBody):
    """``POST /v1/completions`` with a prompt of token ids. Fields left out would be taken from the model's ``generation_config.json``.

    ``logprobs = 0`` requests those of the sampled tokens only. With ``return_tokens_as_token_ids``, the keys of ``top_logprobs`` are
    ``token_id:7`` in place of text.
    """

    model: str | None = None
    prompt: list[TokenId] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    # Neutral values, sent explicitly: any other would change the distribution that log-probs refer to.
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[TokenId]
    # True: only the stop tokens of the request end an answer.
    ignore_eos: bool
    seed: int = Field(ge=0, lt=2**63)
    n: Literal[1] = 1
    logprobs: int = Field(default=0, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    stop: list[str] | None = None
    return_tokens_as_token_ids: Literal[True] | None = None
    # Ids instead of text, and no token added to the prompt.
    return_token_ids: Literal[True] = True
    add_special_tokens: Literal[False] = False
    skip_special_tokens: bool = False
    request_id: str


class VLLMLogProbs(ReplyBody):
    """``choices[].logprobs``."""

    token_logprobs: list[LogProb]
    top_logprobs: list[dict[str, LogProb]] | None = None


class VLLMPromptLogProb(ReplyBody):
    """Value of ``choices[].prompt_logprobs[]``, whose keys are token ids."""

    logprob: LogProb


class VLLMChoice(ReplyBody):
    """``choices[]``. A request aborted before its first token may lack log-probs. The first of ``prompt_logprobs`` is ``None``."""

    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[TokenId]
    logprobs: VLLMLogProbs | None
    prompt_logprobs: list[dict[int, VLLMPromptLogProb] | None] | None = None


class VLLMCompleted(ReplyBody):
    """Reply of ``/v1/completions``."""

    choices: list[VLLMChoice] = Field(min_length=1, max_length=1)


class VLLMPaused(ReplyBody):
    """Reply of ``POST /pause?mode=abort``."""

    status: Literal["paused"]


class VLLMResumed(ReplyBody):
    """Reply of ``POST /resume``."""

    status: Literal["resumed"]


class VLLMReloadArguments(RequestBody):
    """Arguments of the workers' method ``reload_weights``: directory to load from instead of the model's."""

    weights_path: str


class VLLMReload(RequestBody):
    """``POST /collective_rpc``: calls a method on every worker."""

    method: Literal["reload_weights"] = "reload_weights"
    kwargs: VLLMReloadArguments


class VLLMReloaded(ReplyBody):
    """Reply of ``/collective_rpc``: return value of each worker, ``None`` for ``reload_weights``."""

    results: list[None]


class VLLMCard(ReplyBody):
    """``data[]`` of ``GET /v1/models``. An adapter has the model's name as ``parent``."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class VLLMModels(ReplyBody):
    """Reply of ``GET /v1/models``."""

    data: list[VLLMCard] = Field(min_length=1)


class VLLMLoadAdapter(RequestBody):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str


class VLLMUnloadAdapter(RequestBody):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str
