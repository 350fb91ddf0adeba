"""Conversations are extended, and never tokenised again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal.chat import Chat, ParsedAnswer, ToolCall
from areal.inference.protocol import Completion, Sampling
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import TOOLS, USER, answer_of, calculator, chat_of, sampled
from areal.trainer.rollout import Sequence

MORE = {"role": "user", "content": "More?"}
CALL = ToolCall("calculator", {"expression": "2+2"}, "call00001")


def rendered(chat: Chat, messages: list[dict[str, Any]]) -> list[int]:
    return chat.template.ids(chat.template.text(messages, prompt=True))


@pytest.mark.parametrize("name", templates.CALLING)
def test_results_of_tools_extend_to_the_prompt_of_the_template(name: str) -> None:
    chat = chat_of(templates.CALLING[name], *TOOLS)
    talk = chat.start([USER])
    message = ParsedAnswer("", "I wonder." if chat._format.closings else None, (CALL,)).message()
    answer = talk.answer(sampled(answer_of(chat, message)))
    talk.add(*[call.result(calculator(**call.arguments)) for call in answer.tool_calls])
    assert talk.tokens == rendered(chat, talk.messages)
    assert [segment.trainable for segment in talk.segments] == [False, True, False]
    assert talk.messages[-1] == {"role": "tool", "name": "calculator", "content": "4", "tool_call_id": "call00000"}
    talk.answer(sampled(answer_of(chat, message)))
    assert talk.answers[-1].tool_calls[0].id == "call00001"


def test_new_calls_do_not_have_the_identifiers_of_earlier_messages() -> None:
    chat = chat_of(templates.CHATML, *TOOLS)
    earlier = [USER, ParsedAnswer("", tool_calls=(CALL,)).message(), CALL.result("4"), ParsedAnswer("4").message()]
    talk = chat.start([*earlier, MORE])
    for expected in (["call00000", "call00002"], ["call00003", "call00004"]):
        answer = talk.answer(sampled(answer_of(chat, ParsedAnswer("", tool_calls=(CALL, CALL)).message())))
        assert [call.id for call in answer.tool_calls] == expected
        talk.add(*[call.result("4") for call in answer.tool_calls])


@pytest.mark.parametrize("name", ["CHATML", "ALONE", "PAIRS", "LISTED", "CLOSED"])
def test_user_turns_extend_to_the_prompt_of_the_template(name: str) -> None:
    chat = chat_of(templates.CALLING[name])
    talk = chat.start([USER])
    for text in ("Four.", "Five.", "Six."):
        talk.answer(sampled([*chat.template.ids(text), chat.stop_token_ids[0]]))
        talk.add(MORE)
        assert talk.tokens == rendered(chat, talk.messages)


@pytest.mark.parametrize("name", ["CHATML", "ALONE", "LISTED", "PAIRS"])
def test_answer_at_the_limit_gets_an_end_that_is_not_trained(name: str) -> None:
    chat = chat_of(templates.CALLING[name])
    talk = chat.start([USER])
    assert not talk.answer(sampled(chat.template.ids("Fou"))).complete
    talk.add(MORE)
    assert talk.tokens == rendered(chat, talk.messages)
    assert talk.segments[2].tokens[0] == chat.stop_token_ids[0]
    assert not talk.segments[2].trainable


@pytest.mark.parametrize("name", ["THINKING", "OPENED"])
def test_template_that_drops_reasoning_is_refused_or_its_tokens_are_kept(name: str) -> None:
    chat = chat_of(templates.CALLING[name])
    tokens = answer_of(chat, {"content": "Four.", "reasoning_content": "Two."})
    talk = chat.start([USER])
    talk.answer(sampled(tokens))
    before = talk.segments
    with pytest.raises(
        ValueError, match=r"renders earlier turns otherwise once messages of the roles user follow.*rewrites='keep'"
    ):
        talk.add(MORE)
    assert (talk.segments, talk.messages[-1]["role"]) == (before, "assistant")

    kept = chat.start([USER], rewrites="keep")
    kept.answer(sampled(tokens))
    kept.add(MORE)
    text = chat.template.tokenizer.decode(kept.tokens)
    opening = "<think>\n" if name == "OPENED" else ""
    assert text == (
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\nTwo.\n</think>\n\nFour.<|im_end|>\n"
        f"<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n{opening}"
    )


def test_order_of_calls_is_checked() -> None:
    chat = chat_of(templates.CHATML)
    talk = chat.start([USER])
    with pytest.raises(ValueError, match="the last message is no answer"):
        talk.add(MORE)
    talk.answer(sampled([*chat.template.ids("Four."), chat.stop_token_ids[0]]))
    with pytest.raises(ValueError, match=r"the last message is an answer: add\(\) a message"):
        talk.answer(sampled([1]))
    with pytest.raises(ValueError, match="none of the role 'assistant'"):
        talk.add({"role": "assistant", "content": "No."})
    with pytest.raises(ValueError, match="rewrites = 'drop': choose 'error' or 'keep'"):
        chat.start([USER], rewrites="drop")  # type: ignore[arg-type]


class Calculating:
    """An agent of three turns: calls a calculator until it answers."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    async def run(self, client: Any, item: dict[str, Any]) -> list[Sequence]:
        talk = self.chat.start([{"role": "user", "content": item["question"]}])
        for _ in range(3):
            answer = talk.answer(
                await client.generate(talk.tokens, Sampling(64, stop_token_ids=self.chat.stop_token_ids))
            )
            if not answer.tool_calls:
                break
            talk.add(*[call.result(calculator(**call.arguments)) for call in answer.tool_calls])
        return [Sequence(talk.segments, float(answer.content == item["answer"]))]


def test_agent_of_three_turns_is_a_sequence_of_what_was_sampled() -> None:
    chat = chat_of(templates.CHATML, *TOOLS)
    calls = [ParsedAnswer("", tool_calls=(ToolCall("calculator", {"expression": text}),)) for text in ("1+2", "3+4")]
    script = [answer_of(chat, each.message()) for each in (*calls, ParsedAnswer("7"))]
    prompts: list[list[int]] = []

    class Client:
        version = 0

        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            prompts.append(prompt_ids)
            return sampled(script[len(prompts) - 1])

    (sequence,) = asyncio.run(Calculating(chat).run(Client(), {"question": "1+2+4?", "answer": "7"}))
    assert sequence.reward == 1
    assert [list(each.tokens) for each in sequence.segments if each.trainable] == script
    sample = sequence.sample()
    assert sample["input_ids"].tolist() == [*prompts[-1], *script[-1]]
    # Each prompt begins with the one before and the answer to it.
    for earlier, later, answer in zip(prompts, prompts[1:], script, strict=False):
        assert later[: len(earlier) + len(answer)] == [*earlier, *answer]
    assert int(sample["loss_mask"].sum()) == sum(map(len, script))
    assert sample["rollout_logprobs"][sample["loss_mask"] == 1].tolist() == [-0.5] * sum(map(len, script))
