"""Bodies of requests to the test server with the routes of vLLM, independent of those that the client writes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LOGPROBS = 20
"""``--max-logprobs``."""


class Body(BaseModel):
    """Body of a request. Unknown fields are errors here, to find misspelt ones; vLLM ignores them."""

    model_config = ConfigDict(extra="forbid")


class SamplingParams(Body):
    """``sampling_params`` of ``/inference/v1/generate``."""

    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=-1)
    min_p: Literal[0, 0.0] = 0
    frequency_penalty: Literal[0, 0.0] = 0
    presence_penalty: Literal[0, 0.0] = 0
    repetition_penalty: Literal[1, 1.0] = 1
    seed: int = Field(ge=-(2**63), lt=2**63)
    logprobs: int = Field(ge=0, le=MAX_LOGPROBS)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    n: Literal[1] = 1

    @model_validator(mode="after")
    def stop_strings_need_text(self) -> SamplingParams:
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            )
        return self


class Generate(Body):
    """``POST /inference/v1/generate``."""

    request_id: str = "none"
    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    stream: Literal[False] = False


class Completion(Body):
    """``POST /v1/completions``."""

    model: str | None = None
    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=-1)
    min_p: Literal[0, 0.0] = 0
    frequency_penalty: Literal[0, 0.0] = 0
    presence_penalty: Literal[0, 0.0] = 0
    repetition_penalty: Literal[1, 1.0] = 1
    seed: int = Field(ge=-(2**63), lt=2**63)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: Literal[1] = 1
    logprobs: int = Field(ge=0, le=MAX_LOGPROBS)
    return_token_ids: Literal[True]
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    request_id: str = "none"


class Tokenize(Body):
    """``POST /tokenize``."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
