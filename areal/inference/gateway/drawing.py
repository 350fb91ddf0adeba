"""Sampling parameters in a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from areal.inference.gateway.request_error import refused
from areal.inference.protocol import Sampling

IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_tokens_as_token_ids",
        "routed_experts_prompt_start",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields without an effect on the distribution from which tokens are drawn."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "best_of": (1,),
    "echo": (False,),
}
"""Fields that change this distribution, or the answer, with the values that do not."""


class Drawing(BaseModel):
    """Fields that all routes have. What is left out has the value of the gateway."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=128)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None

    TAKEN: ClassVar[frozenset[str]] = frozenset()
    """Further fields that this route reads by itself."""

    def sampling(self, default: Sampling, *, fixed: bool) -> Sampling:
        """Return the parameters of an answer.

        Args:
            default: of the gateway.
            fixed: take temperature, ``top_p`` and ``top_k`` from the gateway in any case.

        Raises:
            RequestError: an answer could not be trained on.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        asked: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "stop": stop or None,
            "seed": self.seed,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
        }
        if not fixed:
            if self.temperature == 0:
                raise refused(
                    "temperature",
                    0,
                    "greedy answers cannot be trained on; pass one above 0, or make the Gateway with fixed_sampling=True",
                )
            top_k = None if self.top_k is None else max(self.top_k, 0)
            asked |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k}
        try:
            return replace(default, **{name: value for name, value in asked.items() if value is not None})
        except ValueError as error:
            raise refused("stop", self.stop, str(error)) from None


def check_extra_fields(
    request: BaseModel, taken: Collection[str] = (), neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raise a :class:`RequestError` for a field that cannot be honoured, such as images.

    Args:
        request: keeps the fields that it does not declare.
        taken: fields that the route reads in another way.
        neutral: values of fields that change nothing.
    """
    for field, value in (request.model_extra or {}).items():
        if field in IGNORED or field in taken or value is None or value in neutral.get(field, ()):
            continue
        values = " or ".join(map(repr, neutral.get(field, ())))
        raise refused(field, value, f"it cannot be trained on; pass {values}" if values else "leave it out")
