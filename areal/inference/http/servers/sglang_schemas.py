"""Requests and replies of SGLang servers.

Taken from the project's public documentation and sources: main at ``067bfe93`` (``docs/advanced_features/sglang_for_rl.md``: updates from
disk, pause, continue, release and resume of memory), ``001067ff`` (``managers/io_struct.py``: their fields and those of ``/generate``),
``0a0dd359`` (``docs/basic_usage/sampling_params.md``), ``0025436e`` (``entrypoints/http_server.py``: replies of pause and continue,
``/abort_request``), ``9c0549b7`` (the same file: ``/model_info``, ``/update_weight_version``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal.inference.http.servers.base_schemas import LogProb, ReplyBody, RequestBody, TokenId


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


class SGLangModelInfo(ReplyBody):
    """``GET /model_info``. ``weight_version`` is ``"default"`` before the first label."""

    weight_version: str | None = None


class SGLangLabel(RequestBody):
    """``POST /update_weight_version``."""

    new_version: str
    abort_all_requests: Literal[False] = False
