"""Bugs of messages and tokens that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

CHAT = "unit/chat/test_chat.py::test_{}"
CONVERSATION = "unit/chat/test_conversation.py::test_{}"


@mutant(
    "areal.chat.chat:Chat._turn",
    CHAT.format("no_header_and_nothing_behind_the_end_of_a_turn_is_trained[CHATML-texts0]"),
)
def header_of_an_answer_is_trained(right: Function) -> Function:
    """A character of the header is trained."""

    def wrong(self: Any, *args: Any) -> tuple[int, int]:
        begin, end = right(self, *args)
        return begin - 1, end

    return wrong


@mutant("areal.chat.chat:Chat._turn", CHAT.format("answer_that_a_template_changes_later_is_refused"))
def answer_that_changes_is_trained(right: Function) -> Function:
    """An answer is trained as it is in the whole conversation, though no prompt leads to it."""
    return lambda self, messages, i, text: (
        right(self, messages[: i + 1], i, self.template.text(messages[: i + 1]))[0],
        len(text),
    )


@mutant(
    "areal.chat.conversation:Conversation._behind",
    CONVERSATION.format("user_turns_extend_to_the_prompt_of_the_template[CHATML]"),
)
def text_behind_a_turn_is_lost(right: Function) -> Function:
    """The newline behind an end-of-turn token is not in the next prompt."""

    def wrong(self: Any, *args: Any) -> list[int] | None:
        found = right(self, *args)
        return None if found is None else [found[0], *found[2:]]

    return wrong


@mutant(
    "areal.chat.call_format:CallFormat._end",
    "unit/chat/test_call_format.py::test_call_that_is_cut_is_an_error_wherever_it_ends[*]",
)
def calls_need_no_end(right: Function) -> Function:
    """A call that the limit of tokens cuts is executed with the parameters that it has."""

    def wrong(self: Any, text: str, place: int) -> int:
        try:
            return right(self, text, place)
        except ValueError:
            return place

    return wrong
