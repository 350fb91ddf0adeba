"""Settings of the samplers, and what they check in the same way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from areal.inference.protocol import Sampling
from areal.tinker.backends.backend import ModelLimits
from areal.tinker.backends.prepared import SamplingRequest
from areal.utils.seeding import mixed


class SamplerConfig(BaseModel):
    """Settings that all samplers have."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sampler: ClassVar[str]
    """Name of the sampler."""

    max_samples: int = Field(default=1024, ge=1, description="Maximum number of answers to one request.")
    max_top_logprobs: int = Field(
        default=128, ge=1, description="Maximum number of most likely tokens that are returned at each position."
    )

    @classmethod
    def checked(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings in a mapping.

        Raises:
            ValueError: a setting is unknown or out of range; names it.
        """
        unknown = sorted(set(config) - set(cls.model_fields))
        if unknown:
            known = sorted(cls.model_fields, key=SamplerConfig.model_fields.__contains__)  # those of all samplers last
            raise ValueError(
                f"sampler_config has {unknown[0]!r}, which is no setting of the {cls.sampler} sampler: choose among "
                f"{', '.join(known)}"
            )
        try:
            return cls(**config)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(part for part in first["loc"] if isinstance(part, str))
            raise ValueError(f"sampler_config.{name} = {first['input']!r}: {first['msg']}") from error


class LocalSamplerConfig(SamplerConfig):
    """Settings of :class:`~areal.tinker.backends.sampling.local_sampler.LocalSampler`: the content of ``--sampler-config``."""

    sampler = "local"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Dtype of the weights. 'auto' is that of the model's files."
    )
    device: str | None = Field(default=None, description="Device of the model. None: a GPU if there is one.")
    attention: str = Field(default="sdpa", description="'sdpa' or an implementation of flash attention.")
    max_context: int | None = Field(
        default=None,
        ge=2,
        description="Maximum number of tokens of a prompt with its answer. None: what the model was made for, at most 8192.",
    )
    max_requests: int = Field(default=64, ge=1, description="Maximum number of answers that are generated at once.")
    cache_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Capacity of the cache of keys and values, in tokens. None: 32768, or max_context if that is more.",
    )
    page_size: int = Field(default=16, ge=4, description="Tokens per page of the cache, the unit that prompts share.")
    max_batch_tokens: int | None = Field(
        default=None, ge=1, description="Maximum number of tokens of a forward. None: 256 on a CPU, 2048 on a GPU."
    )


class VLLMSamplerConfig(SamplerConfig):
    """Settings of :class:`~areal.tinker.backends.sampling.vllm.http_sampler.VLLMSampler`: the content of ``--sampler-config``."""

    sampler = "vllm"

    url: tuple[Annotated[str, Field(pattern="^https?://")], ...] = Field(
        min_length=1, description="Base URL of the server, such as http://127.0.0.1:8100, or a list of several."
    )
    served_name: str | None = Field(
        default=None,
        description="Name under which the server has the base model. None: the server's only model, if its path ends with the same name.",
    )
    api_key_file: str | None = Field(default=None, description="File with the key of --api-key of the server.")
    folder: str | None = Field(
        default=None,
        description="Directory for copies of served adapters, which the server can read under the same path. None: a temporary one.",
    )
    max_requests: int = Field(default=256, ge=1, description="Maximum number of answers that are requested at once.")
    timeout: float = Field(default=600.0, gt=0, description="Seconds for one answer.")
    open_timeout: float = Field(default=120.0, gt=0, description="Seconds for loading an adapter.")
    retry_seconds: float = Field(
        default=10.0,
        ge=0,
        description="Seconds for which a request is repeated after failed connections and statuses above 499.",
    )
    health_seconds: float = Field(
        default=5.0, gt=0, description="Age at which the state of the server is looked up again."
    )
    max_rank: int = Field(default=16, ge=1, description="Largest rank of an adapter: --max-lora-rank of the server.")
    max_top_logprobs: int = Field(
        default=20,
        ge=1,
        description="Maximum number of most likely tokens at each position: --max-logprobs of the server.",
    )

    @field_validator("url", mode="before")
    @classmethod
    def _listed(cls, url: Any) -> Any:
        return (url,) if isinstance(url, str) else url

    @field_validator("url")
    @classmethod
    def _different(cls, url: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(url)) < len(url):
            raise ValueError("give each server once")
        return url


def check_adapter_base(folder: Path, model: str) -> None:
    """Raise a ``ValueError`` if an adapter names another base model. Its folder may have moved: the last component counts."""
    file = folder / "adapter_config.json"
    content = json.loads(file.read_bytes())
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if base and Path(str(base)).name != Path(model).name:
        raise ValueError(f"{file} is of the base model {base!r}, and this server samples from {model!r}")


def checked_sampling(
    request: SamplingRequest, limits: ModelLimits, settings: SamplerConfig, min_temperature: float
) -> Sampling:
    """Return the parameters of a request for a generator, without seed.

    Args:
        request: request.
        limits: sizes of the model.
        settings: limits of a request.
        min_temperature: smallest temperature above 0.

    Raises:
        ValueError: a parameter is out of range.
    """
    # A prompt that fills the context is scored only.
    scored_only = request.max_tokens == 0 and (request.prompt_logprobs or request.prompt_top_k > 0)
    most = 1 if scored_only else limits.max_tokens - len(request.prompt)
    if most < 1:
        raise ValueError(
            f"prompt has {len(request.prompt)} tokens: the context of {limits.max_tokens} tokens has no room for an answer"
        )
    if request.max_tokens is not None and not scored_only and not 1 <= request.max_tokens <= most:
        raise ValueError(
            f"max_tokens = {request.max_tokens}: after a prompt of {len(request.prompt)} tokens it must be at least 1 and at most "
            f"{most}; leave it out for as many as the context allows"
        )
    ranges = {
        "num_samples": (1, settings.max_samples, request.num_samples),
        "topk_prompt_logprobs": (0, settings.max_top_logprobs, request.prompt_top_k),
        "topk_sample_logprobs": (0, settings.max_top_logprobs, request.sample_top_k),
    }
    for name, (low, high, value) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"{name} = {value}: it must be at least {low} and at most {high}")
    if 0 < request.temperature < min_temperature:
        raise ValueError(
            f"temperature = {request.temperature}: it must be at least {min_temperature}, or 0 for the most likely tokens"
        )
    if request.top_k < -1:
        raise ValueError(f"top_k = {request.top_k}: it must be at least 1, or -1 for all tokens")
    # Stops that are given replace the model's own end tokens.
    ends = request.stop_token_ids
    if ends is None and request.stop_strings is not None:
        ends = ()
    return Sampling(
        max_new_tokens=request.max_tokens or most,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        stop_token_ids=ends,
        stop=request.stop_strings or (),
        top_logprobs=request.sample_top_k,
    )


def with_seeds(sampling: Sampling, request: SamplingRequest) -> list[Sampling]:
    """Return the parameters of each answer. Their seeds differ."""
    fields = vars(sampling)
    seed = request.seed
    seeds = [None if seed is None else mixed(seed, index) for index in range(request.num_samples)]
    return [Sampling(**{**fields, "seed": each}) for each in seeds]
