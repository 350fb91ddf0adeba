"""What was sampled in a session, as sequences to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from areal.inference.protocol import Completion
from areal.utils.data.sequences import Segment


@dataclass(frozen=True, eq=False)
class Recorded:
    """A request and its answer.

    Attributes:
        prompt: token ids.
        completion: the answer.
        parent: the request whose prompt and answer are the beginning of this prompt; ``None`` for the first of a sequence.
    """

    prompt: tuple[int, ...]
    completion: Completion
    parent: Recorded | None

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.completion.tokens

    @property
    def chain(self) -> list[Recorded]:
        """All requests of its sequence up to this one, in order."""
        chain, last = [self], self
        while last.parent is not None:
            last = last.parent
            chain.append(last)
        return chain[::-1]


@dataclass(frozen=True)
class SampledSequence:
    """A sequence to train on.

    Attributes:
        segments: answers are trainable, with log-probs and versions. One that branches share is trainable in the first.
        truncated: True if its last answer reached the limit of tokens.
    """

    segments: tuple[Segment, ...]
    truncated: bool


class Recording:
    """Answers of a session. Sequences are told apart by their tokens alone.

    A prompt that begins with an earlier prompt and its answer continues its sequence. Any other prompt starts a new one, such as after a
    compaction of the history. Two prompts that continue the same answer are branches: two sequences with the same beginning.
    """

    def __init__(self) -> None:
        self._recorded: list[Recorded] = []

    def add(self, prompt: Sequence[int], completion: Completion) -> None:
        """Record an answer. One without tokens has nothing to learn from, and is left out."""
        if completion.tokens:
            self._recorded.append(Recorded(tuple(prompt), completion, self._parent(tuple(prompt), completion)))

    def sequences(self) -> list[SampledSequence]:
        """Return all sequences, in the order of their last answers."""
        parents = {id(each.parent) for each in self._recorded}
        trained: set[int] = set()
        sequences = []
        for last in self._recorded:
            if id(last) in parents:
                continue
            segments: list[Segment] = []
            for each in last.chain:
                known = len(each.parent.tokens) if each.parent else 0
                given = Segment(each.prompt[known:], trainable=False)
                shared = id(each) in trained
                trained.add(id(each))
                prompt = [*segments, given] if given.tokens else segments
                answer = Segment(each.completion.tokens, trainable=False)
                segments = [*prompt, answer] if shared else list(each.completion.after(prompt))
            sequences.append(SampledSequence(tuple(segments), last.completion.finish_reason == "length"))
        return sequences

    def _parent(self, prompt: tuple[int, ...], completion: Completion) -> Recorded | None:
        """Return the longest recorded sequence with which a prompt begins, of the same sampling parameters: a sequence has one temperature."""
        drawn = completion.sampling and completion.sampling.distribution()
        fitting = [
            each
            for each in self._recorded
            if prompt[: len(each.tokens)] == each.tokens
            and (each.completion.sampling and each.completion.sampling.distribution()) == drawn
        ]
        return max(fitting, key=lambda each: len(each.tokens), default=None)
