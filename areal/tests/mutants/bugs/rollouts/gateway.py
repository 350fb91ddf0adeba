"""Bugs of the gateway that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

RECORDING = "unit/inference/gateway/test_recording.py::test_{}"
CHAT = "unit/inference/gateway/test_chat_route.py::test_{}"
GATEWAY = "unit/inference/gateway/test_gateway.py::test_{}"


@mutant(
    "areal.inference.gateway.recording:Recording.sequences",
    RECORDING.format("answer_that_branches_share_is_trained_once"),
)
def shared_answer_trained_in_each_branch(right: Function) -> Function:
    """An answer before two branches is trained in both."""

    def wrong(self: Any) -> list[Any]:
        parents = {id(each.parent) for each in self._recorded}
        found = []
        for last in self._recorded:
            if id(last) not in parents:
                alone = type(self)()
                alone._recorded = last.chain
                found += right(alone)
        return found

    return wrong


@mutant(
    "areal.inference.gateway.recording:Recording._parent", RECORDING.format("another_temperature_starts_a_sequence")
)
def sequence_of_two_temperatures(right: Function) -> Function:
    """Answers of any temperature continue a sequence."""

    def wrong(self: Any, prompt: tuple[int, ...], completion: Any) -> Any:
        fitting = [each for each in self._recorded if prompt[: len(each.tokens)] == each.tokens]
        return max(fitting, key=lambda each: len(each.tokens), default=None)

    return wrong


@mutant("areal.inference.gateway.history:_same", CHAT.format("edited_answer_starts_a_sequence"))
def edited_answer_taken_for_the_sampled_one(right: Function) -> Function:
    """Messages of one role are the same."""
    return lambda sent, known: sent["role"] == known["role"]


@mutant(
    "areal.inference.gateway.drawing:check_extra_fields",
    GATEWAY.format("request_that_cannot_be_honoured_is_refused_by_name[2]"),
)
def unknown_fields_ignored(right: Function) -> Function:
    """Fields that change the distribution are ignored."""
    return lambda *_, **__: None


@mutant(
    "areal.inference.gateway.gateway:Gateway._end_if_idle",
    GATEWAY.format("session_with_a_request_under_way_is_not_idle"),
)
def busy_session_ended_as_idle(right: Function) -> Function:
    """A session ends in the middle of a long answer."""
    return lambda self, session: session.end("no request came")


@mutant("areal.inference.gateway.session:Session.end", GATEWAY.format("end_of_a_session_cancels_its_request"))
def request_of_an_ended_session_goes_on(right: Function) -> Function:
    """The end of a session leaves its requests to generate."""

    def wrong(self: Any, why: str = "it has ended") -> None:
        self._ended = self._ended or why

    return wrong


@mutant(
    "areal.inference.gateway.gateway:Gateway.session",
    "unit/inference/gateway/test_named_sessions.py::test_header_names_the_session",
)
def name_of_a_session_ignored(right: Function) -> Function:
    """A session has a random id, whatever name it was given."""
    return lambda self, client, *, name=None, max_requests=None: right(self, client, max_requests=max_requests)
