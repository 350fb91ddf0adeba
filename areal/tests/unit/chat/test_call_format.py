"""Calls whose parameters are in tags: types of values, white space, and calls that end too early."""

from __future__ import annotations

from typing import Any

import pytest

from areal.chat import Chat, ToolCall
from areal.chat.answer import ParsedAnswer
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import answer_of
from areal.tests.unit.chat.tokenizers import chat_tokenizer

TAGS = pytest.mark.parametrize("template", [templates.PAIRS, templates.TAGGED], ids=["one line", "lines of values"])
STRING, NULL, INTEGER, NUMBER = ({"type": name} for name in ("string", "null", "integer", "number"))


def chat_of_tool(template: str, **parameters: Any) -> Chat:
    """Return a chat with the tool ``edit``."""
    schema = {"type": "object", "properties": parameters}
    tool = {"type": "function", "function": {"name": "edit", "description": "Edit.", "parameters": schema}}
    return Chat(chat_tokenizer(template), [tool])


def parsed(chat: Chat, **arguments: Any) -> ParsedAnswer:
    """Return a call with these arguments as the template renders it and the chat parses it."""
    return chat.parse(answer_of(chat, ParsedAnswer("", tool_calls=(ToolCall("edit", arguments),)).message()))


@TAGS
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [STRING, NULL], "default": None}, "Oslo"),
        ({"anyOf": [STRING, NULL]}, "0150"),
        ({"anyOf": [STRING, NULL]}, None),
        ({"type": ["string", "null"]}, "12"),
        ({**STRING, "nullable": True}, None),
        ({**STRING, "nullable": True}, "12"),
        ({"anyOf": [INTEGER, {**STRING, "nullable": True}]}, None),
        ({"oneOf": [INTEGER, STRING]}, "many"),
        ({"oneOf": [INTEGER, STRING]}, 12),
        *(({"anyOf": [INTEGER, STRING]}, text) for text in ("1.10", "1e3", "true", "None", "[1, 2]", '"a"')),
        *(({"anyOf": [NUMBER, STRING]}, value) for value in (12, 1.5, "false")),
        ({"type": ["boolean", "string"]}, True),
        ({"type": ["boolean", "string"]}, "0"),
        ({"type": ["array", "string"]}, ["a"]),
        ({"enum": ["Oslo", "Rome"]}, "Oslo"),
        ({"enum": ["1", "2"]}, "1"),
        ({"const": "3"}, "3"),
        ({"enum": [1, 2.5, True, None]}, 2.5),
        ({"anyOf": [{"$ref": "#/definitions/city"}, NULL]}, "Oslo"),
        ({}, "Oslo"),
        (True, "Oslo"),
        ({"type": "array", "items": STRING}, ["a", "b"]),
    ],
    ids=str,
)
def test_value_of_any_schema_is_read(template: str, schema: Any, value: Any) -> None:
    answer = parsed(chat_of_tool(template, city=schema), city=value)
    assert answer.errors == ()
    got = answer.tool_calls[0].arguments
    assert got == {"city": value}
    assert type(got["city"]) is type(value)


@TAGS
@pytest.mark.parametrize("kinds", [{"enum": [1, 2]}, {"anyOf": [INTEGER, NULL]}], ids=str)
def test_text_is_refused_where_no_string_may_be(template: str, kinds: dict[str, Any]) -> None:
    answer = parsed(chat_of_tool(template, days=kinds), days="three")
    assert answer.tool_calls == ()
    (error,) = answer.errors
    assert "a parameter of the type integer" in error
    assert "has the value 'three'" in error


@TAGS
def test_white_space_of_strings_is_kept(template: str) -> None:
    texts = {"old": "    return 1\n", "new": "\n\treturn 2\n\n", "none": "", "line": "\n"}
    answer = parsed(chat_of_tool(template, **dict.fromkeys(texts, STRING)), **texts)
    assert answer.tool_calls[0].arguments == texts


@TAGS
def test_call_that_is_cut_is_an_error_wherever_it_ends(template: str) -> None:
    chat = chat_of_tool(template, path=STRING, older=STRING)
    call = ToolCall("edit", {"path": "/data", "older": "2020-01-01"})
    whole = chat.template.tokenizer.decode(answer_of(chat, ParsedAnswer("", tool_calls=(call,)).message())[:-1])
    begin = whole.index("edit")
    for end in range(begin + len("edit"), len(whole.rstrip())):
        answer = chat.parse(chat.template.ids(whole[:end]))
        assert answer.tool_calls == (), whole[:end]
        assert "edit" in answer.content
        (error,) = answer.errors
        assert "behind its parameters must be" in error
    assert chat.parse(chat.template.ids(whole)).tool_calls == (call,)


@TAGS
def test_call_without_parameters_is_whole(template: str) -> None:
    chat = chat_of_tool(template, path=STRING)
    assert parsed(chat).tool_calls == (ToolCall("edit", {}),)
    broken = chat.template.tokenizer.decode(answer_of(chat, parsed(chat, path="/data").message()))
    for closing in ("</value>", "</parameter>"):
        broken = broken.replace(closing, "</other>")
    answer = chat.parse(chat.template.ids(broken))
    assert answer.tool_calls == ()
    assert len(answer.errors) == 1
