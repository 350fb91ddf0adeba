"""Episodes in which the model calls tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from areal.chat import Chat, ParsedAnswer, ToolCall
from areal.inference.protocol import Sampling
from areal.tests.harness.limits import PROMPTLY, promptly
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import USER, Scripted, answer_of, calculator, forecast
from areal.tests.unit.chat.tokenizers import chat_tokenizer
from areal.trainer.rollout import Plan, Runner, Sequence
from areal.trainer.rollout.tool_episode import ToolEpisode

QUESTION = {"question": "What is 2+2?", "answer": "4"}


def answer(chat: Chat, content: str = "", *calls: ToolCall) -> list[int]:
    return answer_of(chat, ParsedAnswer(content, tool_calls=calls).message())


def reward(item: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    return float(messages[-1]["content"] == item["answer"])


def episode(*tools: Callable[..., Any], **options: Any) -> tuple[Chat, ToolEpisode]:
    chat = Chat(chat_tokenizer(templates.CHATML), tools)
    messages = lambda item: [{"role": "user", "content": item["question"]}]  # noqa: E731
    return chat, ToolEpisode(chat, tools, messages, reward, Sampling(64), **options)


def play(made: ToolEpisode, client: Any) -> Sequence:
    (sequence,) = asyncio.run(asyncio.wait_for(made.run(client, QUESTION), PROMPTLY))
    made.close()
    return sequence


def results(chat: Chat, client: Scripted) -> str:
    """Return what the model reads at its last turn."""
    return str(chat.template.tokenizer.decode(client.requests[-1][0]))


def test_calls_are_made_until_an_answer() -> None:
    chat, made = episode(calculator, forecast)
    script = [answer(chat, "", ToolCall("calculator", {"expression": "2+2"})), answer(chat, "4")]
    client = Scripted(*script)
    sequence = play(made, client)
    assert sequence.reward == 1
    assert sequence.stats == {"turns": 2, "tool_calls": 1, "tool_errors": 0}
    assert [list(each.tokens) for each in sequence.segments if each.trainable] == script
    assert results(chat, client).endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")
    assert {sampling.stop_token_ids for _, sampling in client.requests} == {chat.stop_token_ids}


def test_calls_of_one_turn_run_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def meet(number: int) -> dict[str, int]:
        """Wait for the other call.

        Args:
            number: of the call.
        """
        both.wait(PROMPTLY)
        return {"number": number}

    chat, made = episode(meet)
    client = Scripted(answer(chat, "", *(ToolCall("meet", {"number": i}) for i in (1, 2))), answer(chat, "4"))
    assert play(made, client).stats == {"turns": 2, "tool_calls": 2, "tool_errors": 0}
    assert '{"number": 1}<|im_end|>\n<|im_start|>tool\n{"number": 2}<|im_end|>' in results(chat, client)


def test_failures_are_results_that_the_model_reads() -> None:
    end = threading.Event()

    def hang(text: str) -> str:
        """Wait.

        Args:
            text: any.
        """
        end.wait(2 * PROMPTLY)
        return text

    chat, made = episode(calculator, hang, tool_seconds=0.3)
    calls = (
        ToolCall("hang", {"text": "a"}),
        ToolCall("calculator", {"expression": "two"}),
        ToolCall("calculator", {"sum": "2"}),
        ToolCall("other", {}),
    )
    tokens = chat.template.ids('<tool_call>\n{"name": 3}\n</tool_call>') + answer(chat, "", *calls)
    client = Scripted(tokens, answer(chat, "No."))
    with promptly():
        sequence = play(made, client)
    end.set()
    assert sequence.stats == {"turns": 2, "tool_calls": 4, "tool_errors": 5}
    assert sequence.reward == 0
    text = results(chat, client)
    for words in (
        "took longer than 0.3 s",
        "Error: ValueError: invalid literal for int() with base 10: 'two'",
        "unexpected keyword argument 'sum'",
        "tool = 'other': choose of calculator, hang",
        "it must be an object with 'name' and 'arguments'",
    ):
        assert words in text


def test_coroutines_and_processes() -> None:
    async def later(expression: str) -> str:
        """Compute.

        Args:
            expression: sum.
        """
        await asyncio.sleep(0)
        return calculator(expression)

    for tool, options in ((later, {}), (calculator, {"processes": True}), (later, {"processes": True})):
        chat, made = episode(tool, **options)
        client = Scripted(answer(chat, "", ToolCall(tool.__name__, {"expression": "2+2"})), answer(chat, "4"))
        assert play(made, client).stats["tool_errors"] == 0
        assert "<|im_start|>tool\n4<|im_end|>" in results(chat, client)


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 3}, 3), ({"max_tokens": 120}, 2)])
def test_turns_and_tokens_are_limited(limits: dict[str, int], turns: int) -> None:
    chat, made = episode(calculator, **limits)
    call = answer(chat, "", ToolCall("calculator", {"expression": "2+2"}))
    client = Scripted(call)
    sequence = play(made, client)
    assert sequence.stats["turns"] == len(client.requests) == turns
    assert sequence.segments[-1].trainable
    if "max_tokens" in limits:
        assert [sampling.max_new_tokens for _, sampling in client.requests] == [64, 120 - len(call)]


def test_runner_logs_turns_and_calls() -> None:
    chat, made = episode(calculator)
    client = Scripted(answer(chat, "", ToolCall("calculator", {"expression": "2+2"})), answer(chat, "4"))
    runner = Runner(client, made, [QUESTION], Plan(1, shuffle=False))
    try:
        runner.advance(0)
        (group,) = runner.next_batch(timeout=60)
    finally:
        runner.close()
    assert (group.failed, group.sequences[0].stats["turns"]) == (0, 2)


def test_bad_input_is_named() -> None:
    chat = Chat(chat_tokenizer(templates.CHATML), [calculator])
    for tools, options, words in (
        ([calculator, forecast], {}, r"tools = \['calculator', 'forecast'\], and the chat has \['calculator'\]"),
        ([calculator], {"max_turns": 0}, "max_turns = 0"),
        ([calculator], {"max_tokens": 0}, "max_tokens = 0"),
        ([calculator], {"tool_seconds": 0}, "ToolPool.seconds = 0"),
    ):
        with pytest.raises(ValueError, match=words):
            ToolEpisode(chat, tools, lambda item: [USER], reward, Sampling(), **options)
