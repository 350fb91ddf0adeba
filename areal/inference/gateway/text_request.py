"""Requests with a text or tokens: ``/v1/completions`` of OpenAI's interface, and vLLM's ``/inference/v1/generate``.

Sources: https://platform.openai.com/docs/api-reference/completions/create; ``entrypoints/scale_out/token_in_token_out/protocol.py`` of
vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from areal.inference.gateway.chat_request import StreamOptions
from areal.inference.gateway.drawing import Drawing
from areal.inference.protocol import Sampling


class TextRequest(Drawing):
    """A request for the continuations of one or several texts, or of their tokens."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def prompts(self, tokenize: Callable[..., Any]) -> list[list[int]]:
        """Return the token ids of each prompt. A text gets special tokens, such as that of its beginning, unless the request has none."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        prompts: list[Any] = list(self.prompt) if several else [self.prompt]
        special = self.add_special_tokens is not False
        return [
            list(tokenize(prompt, add_special_tokens=special)["input_ids"]) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    def sampling(self, default: Sampling, *, fixed: bool) -> Sampling:
        """See :meth:`Drawing.sampling`."""
        return replace(super().sampling(default, fixed=fixed), top_logprobs=self.logprobs or 0)


class TokenDrawing(Drawing):
    """``sampling_params`` of :class:`TokenRequest`."""

    TAKEN: ClassVar[frozenset[str]] = frozenset({"logprobs"})


class TokenRequest(BaseModel):
    """A request for the continuation of token ids."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    token_ids: list[int] = Field(min_length=1)
    stream: Literal[False] | None = None
    sampling_params: TokenDrawing = Field(default_factory=TokenDrawing)
