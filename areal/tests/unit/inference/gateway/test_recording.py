"""Sequences of a session, told apart by their tokens."""

from __future__ import annotations

from areal.inference.gateway.recording import Recording
from areal.inference.protocol import Completion, Sampling


def answer(*tokens: int, version: int = 0, temperature: float = 1.0, ended: str = "stop") -> Completion:
    logprobs = tuple(-token / 100 for token in tokens)
    return Completion(tokens, logprobs, (version,) * len(tokens), ended, Sampling(temperature=temperature))  # type: ignore[arg-type]


def shown(recording: Recording) -> list[list[tuple[list[int], bool]]]:
    """Return tokens of each segment of each sequence, and whether they are trained."""
    return [[(list(each.tokens), each.trainable) for each in sampled.segments] for sampled in recording.sequences()]


def test_turns_of_one_conversation_are_one_sequence() -> None:
    recording = Recording()
    recording.add([1, 2], answer(3, 4, version=5))
    recording.add([1, 2, 3, 4, 7, 8], answer(9, version=6))
    assert shown(recording) == [[([1, 2], False), ([3, 4], True), ([7, 8], False), ([9], True)]]
    first, second = (each for each in recording.sequences()[0].segments if each.trainable)
    assert first.values["versions"].tolist() == [5, 5]
    assert second.values["versions"].tolist() == [6]
    assert second.values["rollout_logprobs"].tolist() == [-0.09000000357627869]


def test_prompt_that_changes_an_earlier_token_starts_a_sequence() -> None:
    recording = Recording()
    recording.add([1, 2], answer(3, 4))
    recording.add([1, 2, 3, 5, 7], answer(9))
    assert shown(recording) == [[([1, 2], False), ([3, 4], True)], [([1, 2, 3, 5, 7], False), ([9], True)]]


def test_answer_that_branches_share_is_trained_once() -> None:
    recording = Recording()
    recording.add([1], answer(2))
    recording.add([1, 2, 3], answer(4))
    recording.add([1, 2, 5], answer(6))
    assert shown(recording) == [
        [([1], False), ([2], True), ([3], False), ([4], True)],
        [([1], False), ([2], False), ([5], False), ([6], True)],
    ]


def test_two_answers_to_one_prompt_are_two_sequences() -> None:
    recording = Recording()
    recording.add([1], answer(2))
    recording.add([1], answer(3))
    recording.add([1, 3, 4], answer(5))
    assert shown(recording) == [
        [([1], False), ([2], True)],
        [([1], False), ([3], True), ([4], False), ([5], True)],
    ]


def test_prompt_that_continues_an_answer_at_once_has_no_given_tokens() -> None:
    recording = Recording()
    recording.add([1], answer(2))
    recording.add([1, 2], answer(3))
    assert shown(recording) == [[([1], False), ([2], True), ([3], True)]]


def test_another_temperature_starts_a_sequence() -> None:
    recording = Recording()
    recording.add([1], answer(2, temperature=1.0))
    recording.add([1, 2, 3], answer(4, temperature=0.5))
    assert [segments[0] for segments in shown(recording)] == [([1], False), ([1, 2, 3], False)]


def test_answers_without_tokens_are_left_out_and_limits_are_kept() -> None:
    recording = Recording()
    recording.add([1], answer())
    recording.add([2], answer(3, ended="length"))
    (sampled,) = recording.sequences()
    assert sampled.truncated
    assert len(recording.sequences()) == 1
