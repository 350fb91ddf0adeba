"""Requests and replies of SGLang servers.

Taken from the wheel of release 0.5.23: ``srt/entrypoints/http_server.py`` (routes and replies), ``srt/managers/io_struct.py`` (fields),
``srt/sampling/sampling_params.py``, ``srt/managers/tokenizer_manager.py`` and ``srt/utils/weight_versions.py`` (``meta_info``),
``srt/layers/sampler.py`` (log-probs). Compared with a running server by ``make test-sglang``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal.inference.http.servers.http_call import LabelSpan, LogProb, ReplyBody, RequestBody, SetLabel, TokenId


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
    stop: list[str] | None = None
    stop_token_ids: list[TokenId]
    ignore_eos: bool
    # Return every sampled token, including special and stop tokens.
    skip_special_tokens: Literal[False] = False
    no_stop_trim: Literal[True] = True
    sampling_seed: int = Field(ge=0)


class SGLangGenerate(RequestBody):
    """``POST /generate``.

    ``return_sampling_mask`` requests the tokens that ``top_p`` and ``top_k`` leave, and log-probs under the distribution over these: of the
    sampled token, or with ``sampling_logprobs_mode="support"`` of each. ``lora_path`` is the name of a loaded adapter.
    """

    rid: str
    input_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SGLangSampling
    # Log-probs of the sampled tokens only, not of the prompt.
    return_logprob: Literal[True] = True
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: int | None = None
    return_sampling_mask: Literal[True] | None = None
    sampling_logprobs_mode: Literal["support"] | None = None
    lora_path: str | None = None
    return_routed_experts: Literal[True] | None = None
    stream: Literal[False] = False


class SGLangFinish(ReplyBody):
    """``meta_info.finish_reason``. ``matched``: token or stop string that ended the request."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None


Entry = tuple[LogProb | None, TokenId, str | None]
"""Log-prob, id and optional text of a token. The log-prob is ``None`` if it is not finite."""


class SGLangMeta(ReplyBody):
    """``meta_info``. The fields of log-probs have one entry for each token. A request that is aborted while it waits lacks those of
    ``return_sampling_mask``, and may lack all. ``weight_versions`` may be missing if there is no token.
    """

    finish_reason: SGLangFinish
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    routed_experts: str | None = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry]] | None = None
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[LogProb | list[LogProb | None] | None] | None = None
    weight_versions: tuple[LabelSpan, ...] = ()


class SGLangGenerated(ReplyBody):
    """Reply of ``/generate`` to one prompt."""

    meta_info: SGLangMeta


class SGLangPause(RequestBody):
    """``POST /pause_generation``: ``"abort"`` returns running requests with their tokens so far, and ``"retract"`` puts them back into the
    queue without their keys and values. ``/continue_generation`` continues these.
    """

    mode: Literal["abort", "retract"]


class SGLangUpdateFromDisk(RequestBody):
    """``POST /update_weights_from_disk``."""

    model_path: str
    weight_version: str
    # Keys and values of the old weights must not be reused.
    flush_cache: Literal[True] = True


class SGLangSuccess(ReplyBody):
    """Reply of the routes for weights and adapters. A failure has status 400."""

    success: Literal[True]


class SGLangLoadAdapter(RequestBody):
    """``POST /load_lora_adapter``. The name must be free."""

    lora_name: str
    lora_path: str


class SGLangUnloadAdapter(RequestBody):
    """``POST /unload_lora_adapter``. Waits for the end of the adapter's requests."""

    lora_name: str


class SGLangMemory(RequestBody):
    """``POST /release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: tuple[Literal["kv_cache", "weights"], ...] = ("kv_cache", "weights")


class SGLangAbort(RequestBody):
    """``POST /abort_request``."""

    rid: str


class SGLangSetLabel(SetLabel):
    """``POST /update_weight_version``, which aborts all requests by default."""

    abort_all_requests: Literal[False] = False


class SGLangServerInfo(ReplyBody):
    """Reply of ``GET /server_info``: release, arguments of the server, and the length that a prompt must not reach."""

    version: str
    model_path: str
    enable_lora: bool | None = None
    tp_size: int = Field(ge=1)
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    sampling_mask_max_tokens: int = 4096
    max_req_input_len: int | None = None
    quantization: str | None = None
