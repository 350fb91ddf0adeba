"""An answer that is made in pieces."""

from __future__ import annotations

import secrets

from areal.trainer.rollout.http.dialects import ReplyPart
from areal.trainer.rollout.protocol import Completion, FinishReason, Sampling


class Answer:
    """What there is of an answer.

    Attributes:
        prompt: what was given. sampling: how to go on. seed: that of the sampling, or one that was drawn.
        tokens, logprobs, versions: what was made.
        finish: why it ended; ``None`` until then.
        deadline: until when its next piece must come, on the monotonic clock; ``None`` when nothing was asked for yet.
    """

    def __init__(self, prompt: list[int], sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: FinishReason | None = None
        self.deadline: float | None = None

    def add(self, piece: ReplyPart, version: int) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += [version] * len(piece.tokens)
        if piece.finish == "length" or len(self.tokens) == self.sampling.max_new_tokens:
            self.finish = "length"
        if self.tokens and self.tokens[-1] in self.sampling.stop_token_ids:
            self.finish = "stop"  # else an end-of-sequence token of the model's own ended the request

    def completion(self) -> Completion:
        return Completion(tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), self.finish or "aborted")
