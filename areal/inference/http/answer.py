"""An answer that is generated in one or more requests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.inference.http.sent_images import SentImages
from areal.inference.http.servers.dialect import ImageRoutes, ReplyPart, Routes
from areal.inference.http.servers.http_call import HTTPCall, ReplyBody
from areal.inference.protocol import Completion, FinishReason, Sampling, TopTokens
from areal.inference.stop_strings import StopStrings


class Answer:
    """State of an answer. An update of the weights interrupts a request, and the next request continues the answer.

    Args:
        prompt: token ids of the prompt.
        sampling: sampling parameters.
        stop: its stop strings, if it has some. A server does not find one that an interruption cuts.
        images: images of the prompt, if it has some.

    Attributes:
        prompt, sampling, images: as given.
        seed: seed of the sampling, or a random one.
        tokens, logprobs, versions, top: tokens generated so far; see :class:`~areal.inference.protocol.Completion`.
        routed_experts: experts of the prompt and of these tokens but the last, if servers return them.
        finish: why the answer ended; ``None`` until then.
        deadline: time on the monotonic clock by which the next tokens must arrive; ``None`` before the first attempt, and after a
            sign of life of the server that generates them.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        stop: StopStrings | None = None,
        images: SentImages | None = None,
    ) -> None:
        self.prompt, self.sampling, self._stop, self.images = prompt, sampling, stop, images
        # Servers take seeds of 63 bits.
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**63
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top: list[TopTokens] = []
        self.routed_experts: Tensor | None = None
        self.finish: FinishReason | None = None
        self.deadline: float | None = None

    def request(self, routes: Routes, name: str, version: int) -> HTTPCall[ReplyBody]:
        """Return the request for the rest of the answer.

        Args:
            routes: requests of the server.
            name: id of the request.
            version: of the weights of the server.

        Raises:
            ValueError: the prompt has images, and the server takes none.
        """
        what = (name, self.prompt + self.tokens, len(self.tokens), self.sampling, self.seed)
        if self.images is None:
            return routes.generate(*what)
        if not isinstance(routes, ImageRoutes):
            raise ValueError(
                "the prompt has images, and this server gets tokens alone: start vLLM with --enable-scale-out and "
                "--no-mm-device-do-normalize, or generate with LocalRollout"
            )
        return routes.generate_with_images(*what, self.images.under(version))

    def note_life(self) -> None:
        """Note that the server that generates the next tokens is healthy."""
        self.deadline = None

    def check_length(self, max_context: int | None) -> None:
        """Raise if the answer does not fit into the context of a server, ``None`` if it is unknown.

        Raises:
            ValueError: it does not.
        """
        length = len(self.prompt) + self.sampling.max_new_tokens
        if max_context is not None and length > max_context:
            raise ValueError(
                f"{len(self.prompt)} tokens of the prompt and Sampling.max_new_tokens = {self.sampling.max_new_tokens} are more than the "
                f"server's context of {max_context}"
            )

    def check(self, reply: ReplyPart) -> None:
        """Raise if a reply cannot be the next part.

        Raises:
            ValueError: it has too many tokens, or none where it stopped at one, or lacks the most likely tokens.
        """
        if len(reply.tokens) > self.sampling.max_new_tokens - len(self.tokens):
            raise ValueError(f"{len(reply.tokens)} tokens came, which is more than were asked for")
        if reply.finish == "stop" and not reply.tokens:
            raise ValueError("it stopped at a token, and none came")
        if self.sampling.top_logprobs and len(reply.top) != len(reply.tokens):
            raise ValueError(
                f"{len(reply.tokens)} tokens came with the most likely tokens of {len(reply.top)} positions"
            )
        length = len(self.prompt) + len(self.tokens) + len(reply.tokens)
        if reply.tokens and reply.routed_experts is not None and len(reply.routed_experts) != length - 1:
            raise ValueError(f"experts of {len(reply.routed_experts)} tokens came, and {length - 1} were computed")

    def add(self, reply: ReplyPart, versions: Sequence[int]) -> None:
        """Append the tokens of one reply, with the version of the weights that generated each."""
        before = len(self.tokens)
        self.tokens += reply.tokens
        self.logprobs += reply.logprobs
        self.versions += versions
        self.top += reply.top
        if reply.tokens and reply.routed_experts is not None:
            # The request for the rest computed all tokens again: each keeps the experts with which the next one was drawn.
            known = reply.routed_experts[:0] if self.routed_experts is None else self.routed_experts
            self.routed_experts = torch.cat([known, reply.routed_experts[len(known) :]])
        # A server may find a stop string some tokens late.
        count = None if self._stop is None else self._stop.find(self.tokens, before)
        if count is not None:
            for values in (self.tokens, self.logprobs, self.versions, self.top):
                del values[count:]
            if self.routed_experts is not None:
                self.routed_experts = self.routed_experts[: len(self.prompt) + count - 1]
        if reply.finish == "length" or len(self.tokens) == self.sampling.max_new_tokens:
            self.finish = "length"
        # With stop tokens of the request, an end-of-sequence token of the model ends a part: the answer continues.
        stops = self.sampling.stop_token_ids
        at_token = reply.finish == "stop" if stops is None else self.tokens and self.tokens[-1] in stops
        if at_token or count is not None or reply.stop_string:
            self.finish = "stop"

    def completion(self) -> Completion:
        """Return the answer so far, ``"aborted"`` if it is incomplete."""
        finish = self.finish or "aborted"
        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.versions),
            finish,
            self.sampling,
            tuple(self.top),
            self.routed_experts if self.tokens else None,
        )
