"""Settings of the local sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class LocalSamplerConfig(BaseModel):
    """Settings of :class:`~areal.tinker.backends.local_sampler.LocalSampler`: the content of ``--sampler-config``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    max_samples: int = Field(default=1024, ge=1, description="Maximum number of answers to one request.")
    max_top_logprobs: int = Field(
        default=128, ge=1, description="Maximum number of most likely tokens that are returned at each position."
    )

    @classmethod
    def checked(cls, config: Mapping[str, Any]) -> LocalSamplerConfig:
        """Return the settings in a mapping.

        Raises:
            ValueError: a setting is unknown or out of range; names it.
        """
        unknown = sorted(set(config) - set(cls.model_fields))
        if unknown:
            raise ValueError(
                f"sampler_config has {unknown[0]!r}, which is no setting of the local sampler: choose among "
                f"{', '.join(cls.model_fields)}"
            )
        try:
            return cls(**config)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ValueError(f"sampler_config.{name} = {first['input']!r}: {first['msg']}") from error
