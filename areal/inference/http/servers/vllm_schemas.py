"""Requests and replies of vLLM servers.

Taken from the project's public documentation and sources, and checked against a server of release 0.32.0: v0.32.0 and main at ``006ebac2``
(``docs/training/async_rl.md``: ``/pause``, ``/resume``; ``docs/features/sleep_mode.md``: ``/sleep``, ``/wake_up``), ``002032ee``
(``entrypoints/openai/completion/protocol.py``: ``/v1/completions``), ``055e47c2`` (``entrypoints/serve/dev/rpc/api_router.py``:
``/collective_rpc``); in the wheel of 0.32.0 ``entrypoints/rl/online/api_router.py`` (``/weight_info``, ``/update_weight_version``) and
``entrypoints/scale_out/token_in_token_out/protocol.py`` (``/inference/v1/generate``).
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from areal.inference.http.servers.http_call import LabelSpan, LogProb, ReplyBody, RequestBody, TokenId
from areal.inference.http.servers.vllm_images import VLLMFeatures


class VLLMDrawing(RequestBody):
    """Sampling parameters of one answer. Fields left out would be taken from the model's ``generation_config.json``.

    ``logprobs``: number of the most likely tokens in the reply, in addition to the sampled one.
    """

    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    # Neutral values, sent explicitly: any other would change the distribution that log-probs refer to.
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[TokenId]
    # True: only the stop tokens of the request end an answer.
    ignore_eos: bool
    seed: int = Field(ge=0, lt=2**63)
    logprobs: int = Field(default=0, ge=0)
    # Stop strings may have special tokens.
    skip_special_tokens: Literal[False] = False
    n: Literal[1] = 1


class VLLMCompletion(VLLMDrawing):
    """``POST /v1/completions`` with a prompt of token ids.

    With ``return_tokens_as_token_ids``, the keys of ``top_logprobs`` are ``token_id:7`` in place of text.
    """

    model: str | None = None
    prompt: list[TokenId] = Field(min_length=1)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    return_tokens_as_token_ids: Literal[True] | None = None
    # Ids instead of text, and no token added to the prompt.
    return_token_ids: Literal[True] = True
    add_special_tokens: Literal[False] = False
    request_id: str


class VLLMLogProbs(ReplyBody):
    """``choices[].logprobs``."""

    token_logprobs: list[LogProb]
    top_logprobs: list[dict[str, LogProb]] | None = None


class VLLMPromptLogProb(ReplyBody):
    """Value of ``choices[].prompt_logprobs[]``, whose keys are token ids."""

    logprob: LogProb


class VLLMChoiceBase(ReplyBody):
    """Fields of ``choices[]`` of both routes. ``stop_reason``: stop string or token that ended the request."""

    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None = None
    token_ids: list[TokenId]
    routed_experts: str | None = None


class VLLMChoice(VLLMChoiceBase):
    """``choices[]``. A request aborted before its first token may lack log-probs. The first of ``prompt_logprobs`` is ``None``."""

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

    results: list[None] = Field(min_length=1)


class VLLMLoadAdapter(RequestBody):
    """``POST /v1/load_lora_adapter``. The name must be free."""

    lora_name: str
    lora_path: str


class VLLMUnloadAdapter(RequestBody):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str


class VLLMSampling(VLLMDrawing):
    """``sampling_params`` of ``/inference/v1/generate``."""

    detokenize: bool


class VLLMGenerate(RequestBody):
    """``POST /inference/v1/generate``."""

    request_id: str
    model: str | None = None
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: VLLMSampling
    features: VLLMFeatures | None = None


class VLLMTokenLogProb(TypedDict):
    """A token and its log-prob. A dict and not a class: a reply has one for each token."""

    token_id: TokenId
    logprob: LogProb


class VLLMPosition(VLLMTokenLogProb):
    """``choices[].logprobs.content[]`` with the most likely tokens. The first of them is the sampled token, which counts."""

    top_logprobs: list[VLLMTokenLogProb]


P = TypeVar("P", bound=VLLMTokenLogProb)


class VLLMTokenLogProbs(ReplyBody, Generic[P]):
    """``choices[].logprobs``."""

    content: list[P]


class VLLMTokensChoice(VLLMChoiceBase, Generic[P]):
    """``choices[]`` of ``/inference/v1/generate``."""

    logprobs: VLLMTokenLogProbs[P] | None
    weight_versions: list[LabelSpan]


class VLLMGeneratedBase(ReplyBody, Generic[P]):
    """Reply of ``/inference/v1/generate``."""

    choices: list[VLLMTokensChoice[P]] = Field(min_length=1, max_length=1)


class VLLMGenerated(VLLMGeneratedBase[VLLMTokenLogProb]):
    """Reply of ``/inference/v1/generate`` without the most likely tokens."""


class VLLMGeneratedTop(VLLMGeneratedBase[VLLMPosition]):
    """Reply of ``/inference/v1/generate`` with the most likely tokens."""


class VLLMMultimodalConfig(ReplyBody):
    """``vllm_config.model_config.multimodal_config`` of ``GET /server_info``."""

    mm_device_do_normalize: bool = False


class VLLMModelConfig(ReplyBody):
    """``vllm_config.model_config`` of ``GET /server_info``."""

    logprobs_mode: str
    enable_return_routed_experts: bool | None = None
    multimodal_config: VLLMMultimodalConfig | None = None
    quantization: str | None = None


class VLLMConfig(ReplyBody):
    """``vllm_config`` of ``GET /server_info``."""

    model_config_: VLLMModelConfig = Field(alias="model_config")


class VLLMServerInfo(ReplyBody):
    """Reply of ``GET /server_info?config_format=json``."""

    vllm_config: VLLMConfig
