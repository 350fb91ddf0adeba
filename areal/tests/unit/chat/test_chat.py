"""Prompts, masks and parsed answers of chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from areal.chat import Chat, ParsedAnswer, ToolCall
from areal.chat.answer import ParsedCalls
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import FORECAST, TOOLS, USER, answer_of, chat_of
from areal.tests.unit.chat.tokenizers import chat_tokenizer

TURNS = [USER, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "And 3+3?"}]
DONE = [*TURNS, {"role": "assistant", "content": "Six."}]


def trained(chat: Chat, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    return [
        chat.template.tokenizer.decode(each.tokens) for each in chat.segments(messages, **options) if each.trainable
    ]


@pytest.mark.parametrize("name", templates.CALLING)
def test_prompt_and_sample_are_those_of_the_template(name: str) -> None:
    chat = chat_of(templates.CALLING[name])
    apply = chat.template.tokenizer.apply_chat_template
    assert chat.prompt(TURNS) == apply(TURNS, add_generation_prompt=True, return_dict=False)
    sample = chat.sample(
        DONE if name not in ("THINKING", "OPENED") else [USER, {**DONE[1], "reasoning_content": "Two."}]
    )
    wanted = DONE if name not in ("THINKING", "OPENED") else [USER, {**DONE[1], "reasoning_content": "Two."}]
    assert sample["input_ids"].tolist() == apply(wanted, return_dict=False)
    # A position predicts the token behind it.
    assert sample["loss_mask"].sum() == sum(len(each.tokens) for each in chat.segments(wanted) if each.trainable)
    assert torch.equal(sample["loss_mask"], sample["loss_mask"].bool().float())


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("CHATML", ["Four.<|im_end|>", "Six.<|im_end|>"]),
        ("CLOSED", ["Four.<|im_end|>", "Six.<|im_end|>"]),
        ("ALONE", ["Four.<|eot_id|>", "Six.<|eot_id|>"]),
        ("LISTED", ["Four.<eos>", "Six.<eos>"]),
        # The end of the last answer is the header of a turn that is not there.
        ("PAIRS", ["Four.<|user|>", "Six."]),
    ],
)
def test_no_header_and_nothing_behind_the_end_of_a_turn_is_trained(name: str, texts: list[str]) -> None:
    chat = chat_of(templates.CALLING[name])
    assert trained(chat, DONE) == texts
    assert trained(chat, DONE, train="last") == texts[-1:]


def test_answer_that_a_template_changes_later_is_refused() -> None:
    chat = chat_of(templates.THINKING)
    with pytest.raises(
        ValueError,
        match=r"(?s)messages\[1\]: the chat template renders .*think.* train on samples that end with an answer",
    ):
        chat.segments(DONE)
    assert trained(chat, DONE, train="last") == ["<think>\n\n</think>\n\nSix.<|im_end|>"]
    opened = chat_of(templates.OPENED)
    assert trained(opened, [USER, {**DONE[1], "reasoning_content": "Two."}]) == ["Two.\n</think>\n\nFour.<|im_end|>"]


@pytest.mark.parametrize("name", templates.CALLING)
def test_calls_are_parsed_as_they_were_rendered(name: str) -> None:
    chat = chat_of(templates.CALLING[name], *TOOLS)
    calls = [ToolCall("forecast", FORECAST, "call00001"), ToolCall("calculator", {"expression": "2+2"}, "call00002")]
    for given in (calls[:1], calls[1:], calls) if name != "ALONE" else (calls[:1], calls[1:]):
        message = ParsedAnswer("", "I wonder." if chat._format.closings else None, tuple(given)).message()
        answer = chat.parse(answer_of(chat, message))
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [(x.name, x.arguments) for x in given]
        assert (answer.content, answer.errors, answer.complete) == ("", (), True)
        assert answer.reasoning == message.get("reasoning_content")


@pytest.mark.parametrize("name", ["THINKING", "OPENED"])
def test_reasoning_is_parsed(name: str) -> None:
    chat = chat_of(templates.CALLING[name])
    ids = chat.template.ids
    opening = "" if name == "OPENED" else "<think>\n"
    end = [chat.stop_token_ids[0]]
    assert chat.parse(ids(opening + "Two.\n</think>\n\nFour.") + end) == ParsedAnswer("Four.", "Two.")
    assert chat.parse(ids(opening + "Two and")) == ParsedAnswer("", "Two and", complete=False)
    assert chat.parse(ids(opening + "\n</think>\n\nFour.") + end) == ParsedAnswer("Four.")
    if name == "THINKING":
        assert chat.parse(ids("Four.") + end) == ParsedAnswer("Four.")


def test_malformed_calls_are_named_and_stay_in_the_text() -> None:
    chat = chat_of(templates.CHATML, *TOOLS)
    good = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
    text = f'Well.<tool_call>\n{{"name": "calcul\n</tool_call>{good}<tool_call>\n{{"name": "other", "arguments": {{}}}}\n</tool_call>'
    answer = chat.parse([*chat.template.ids(text), chat.stop_token_ids[0]])
    assert [call.name for call in answer.tool_calls] == ["calculator", "other"]
    assert answer.content == 'Well.<tool_call>\n{"name": "calcul\n</tool_call>'
    first, second = answer.errors
    assert "calcul" in first
    assert second == "tool = 'other': choose of calculator, forecast"


def test_text_that_is_nested_too_deeply_is_no_call() -> None:
    chat = chat_of(templates.CHATML, *TOOLS)
    (error,) = chat.parse(chat.template.ids("<tool_call>\n" + '{"a":' * 10_000)).errors
    assert "recursion" in error


def test_json_that_is_no_call_is_content() -> None:
    chat = chat_of(templates.ALONE, *TOOLS)
    assert chat.parse([*chat.template.ids('{"answer": 4}'), chat.stop_token_ids[0]]) == ParsedAnswer('{"answer": 4}')


def test_value_of_another_type_is_an_error() -> None:
    chat = chat_of(templates.PAIRS, *TOOLS)
    text = "<call>forecast\n<key>city</key>\n<value>7</value>\n<key>days</key>\n<value>three</value>\n</call>"
    answer = chat.parse(chat.template.ids(text))
    assert "a parameter of the type integer has the value 'three'" in answer.errors[0]
    answer = chat.parse(chat.template.ids(text.replace("three", "3")))
    assert answer.tool_calls[0].arguments == {"city": "7", "days": 3}


def test_own_parser_of_calls() -> None:
    def parse(text: str) -> ParsedCalls:
        name, _, rest = text.partition("!")
        return ParsedCalls([ToolCall("calculator", {"expression": name})], [], rest)

    chat = chat_of(templates.NO_SYSTEM, *TOOLS, parse_calls=parse)
    assert chat.parse(chat.template.ids("2+2! Wait.")) == ParsedAnswer(
        "Wait.", None, (ToolCall("calculator", {"expression": "2+2"}),), complete=False
    )


def test_bad_input_is_named() -> None:
    with pytest.raises(
        ValueError, match="its calls are not rendered, or in a form that was not learned: pass parse_calls"
    ):
        chat_of(templates.NO_SYSTEM, *TOOLS)
    with pytest.raises(ValueError, match="refuses messages of the roles system, user: System role not supported"):
        chat_of(templates.NO_SYSTEM).prompt([{"role": "system", "content": "Be nice."}, USER])
    with pytest.raises(ValueError, match="it has no chat template"):
        chat_of("")
    with pytest.raises(ValueError, match="its chat template does not render the text of a message"):
        chat_of("{% for m in messages %}<|u|>{% endfor %}")
    chat = chat_of(templates.CHATML)
    with pytest.raises(ValueError, match="no message of the role 'assistant'"):
        chat.segments([USER])
    with pytest.raises(ValueError, match="train = 'first': choose 'all' or 'last'"):
        chat.segments(DONE, train="first")  # type: ignore[arg-type]


def test_content_is_a_list_where_a_template_wants_one() -> None:
    parts = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    chat = chat_of(parts + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    assert trained(chat, DONE) == ["Four.<|im_end|>", "Six.<|im_end|>"]


def test_tools_are_functions_or_schemas() -> None:
    tokenizer = chat_tokenizer(templates.CHATML)
    schema = {
        "type": "function",
        "function": {"name": "calculator", "description": "Compute.", "parameters": {"type": "object"}},
    }
    assert '"calculator"' in tokenizer.decode(Chat(tokenizer, [schema]).prompt([USER]))
    assert '"expression"' in tokenizer.decode(Chat(tokenizer, TOOLS).prompt([USER]))


@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_as_text_keep_their_characters(as_text: bool) -> None:
    """A template that wants JSON gets the caller's text, or one with the characters of the values."""
    text = '{"city":"Zürich","days":3}'
    function = {"name": "forecast", "arguments": text if as_text else json.loads(text)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    rendered = chat_of(templates.LISTED, *TOOLS).template.text([USER, call])
    assert (text if as_text else '{"city": "Zürich", "days": 3}') in rendered
