"""Messages through the gateway: prompts, parsed answers, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

from areal.chat import ToolCall
from areal.inference.protocol import Completion, Sampling, TopTokens
from areal.tests.unit.chat import templates
from areal.tests.unit.inference.gateway.programs import (
    TOOLS,
    USER,
    Model,
    ask,
    decoded,
    run,
    served,
    tokenizer,
    written,
)

CALL = ToolCall("calculator", {"expression": "2+2"})


def tokens_of(sampled: Any) -> list[int]:
    return [int(token) for segment in sampled.segments for token in segment.tokens]


def test_tool_loop_is_one_sequence_of_the_sampled_tokens() -> None:
    async def work() -> None:
        model = Model(written("", CALL), written("4"))
        async with served(model) as (_, session, http):
            reply = await ask(http, USER, tools=TOOLS)
            choice = reply["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"expression": "2+2"}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
            last = await ask(http, USER, choice["message"], result, tools=TOOLS)
            assert last["choices"][0]["message"]["content"] == "4"
            assert last["choices"][0]["finish_reason"] == "stop"
        (sampled,) = session.sequences()
        assert [list(each.tokens) for each in sampled.segments if each.trainable] == [
            list(each) for each in model.answers
        ]
        assert tokens_of(sampled) == model.prompts[1] + list(model.answers[1])
        assert last["usage"] == {
            "prompt_tokens": len(model.prompts[1]),
            "completion_tokens": len(model.answers[1]),
            "total_tokens": len(model.prompts[1]) + len(model.answers[1]),
        }
        # The prompt is that of the template.
        made = tokenizer()
        messages = [
            USER,
            {**choice["message"], "content": "", "tool_calls": [CALL.message()]},
            {**result, "name": "calculator"},
        ]
        assert decoded(model.prompts[1]) == made.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
        )

    run(work)


def test_spaces_that_a_program_loses_do_not_start_a_sequence() -> None:
    async def work() -> None:
        model = Model(written(" 4  \n"), written("5"))
        async with served(model) as (_, session, http):
            await ask(http, USER)
            await ask(http, USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "More?"})
        (sampled,) = session.sequences()
        assert " 4  \n" in decoded(tokens_of(sampled))

    run(work)


def test_compacted_history_starts_a_sequence() -> None:
    async def work() -> None:
        model = Model(written("4"))
        async with served(model) as (_, session, http):
            await ask(http, USER)
            await ask(http, {"role": "user", "content": "In short: 2+2 is 4. And 3+3?"})
        assert len(session.sequences()) == 2

    run(work)


def test_edited_answer_starts_a_sequence() -> None:
    async def work() -> None:
        model = Model(written("4"))
        async with served(model) as (_, session, http):
            await ask(http, USER)
            await ask(http, USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"})
        assert len(session.sequences()) == 2
        second = session.sequences()[1]
        assert sum(len(each.tokens) for each in second.segments if each.trainable) == len(written("4"))
        assert "assistant\n5" in decoded(tokens_of(second))

    run(work)


def test_branches_continue_their_own_answer() -> None:
    async def work() -> None:
        model = Model(written("4"), written("left"), written("right"))
        async with served(model) as (_, session, http):
            first = await ask(http, USER)
            known = [USER, first["choices"][0]["message"]]
            await asyncio.gather(
                *(ask(http, *known, {"role": "user", "content": text}) for text in ("Go left.", "Go right."))
            )
        trained = [[decoded(list(s.tokens)) for s in each.segments if s.trainable] for each in session.sequences()]
        assert sorted(map(len, trained)) == [1, 2]
        assert sorted(text for texts in trained for text in texts) == [
            "4<|im_end|>",
            "left<|im_end|>",
            "right<|im_end|>",
        ]

    run(work)


def test_reasoning_that_a_program_leaves_out_is_found_again() -> None:
    async def work() -> None:
        answers = [
            written("", CALL, template=templates.THINKING, reasoning_content="Hm."),
            written("4", template=templates.THINKING),
        ]
        model = Model(*answers)
        async with served(model, templates.THINKING) as (_, session, http):
            reply = await ask(http, USER, tools=TOOLS)
            message = reply["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm."
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
            message.pop("reasoning_content")
            await ask(http, USER, message, result, tools=TOOLS)
        assert len(session.sequences()) == 1

    run(work)


def test_template_that_drops_reasoning_starts_a_sequence_unless_it_is_kept() -> None:
    async def work() -> None:
        answer = written("4", template=templates.THINKING, reasoning_content="Hm.")
        for rewrites, sequences in (("new", 2), ("keep", 1)):
            model = Model(answer)
            async with served(model, templates.THINKING, rewrites=rewrites) as (_, session, http):
                reply = await ask(http, USER)
                await ask(http, USER, reply["choices"][0]["message"], {"role": "user", "content": "More?"})
            assert len(session.sequences()) == sequences
            text = str(tokenizer(templates.THINKING).decode(model.prompts[1]))
            assert ("Hm." in text) == (rewrites == "keep")

    run(work)


def test_several_answers_are_several_sequences() -> None:
    async def work() -> None:
        model = Model(written("4"), written("5"))
        async with served(model) as (_, session, http):
            reply = await ask(http, USER, n=2, seed=7)
        assert sorted(each["message"]["content"] for each in reply["choices"]) == ["4", "5"]
        assert sorted(each.seed for each in model.samplings) == [7, 8]  # type: ignore[type-var]
        assert len(session.sequences()) == 2

    run(work)


def test_stop_string_is_cut_from_the_text_and_recorded() -> None:
    async def work() -> None:
        answer = written("4 END of it")[:-1]
        model = Model(answer)
        async with served(model) as (_, session, http):
            reply = await ask(http, USER, stop="END")
            assert reply["choices"][0]["message"]["content"] == "4"
            await ask(http, USER, reply["choices"][0]["message"], {"role": "user", "content": "More?"})
        assert model.samplings[0].stop == ("END",)
        (sampled,) = session.sequences()
        assert "4 END of it<|im_end|>" in decoded(tokens_of(sampled))
        assert [list(each.tokens) for each in sampled.segments if each.trainable] == [answer, answer]

    run(work)


def test_sampling_is_what_the_program_asks_for() -> None:
    async def work() -> None:
        stops = tokenizer().convert_tokens_to_ids(["<|im_end|>", "<eos>"])
        asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_completion_tokens": 7, "seed": 3}
        for fixed, drawn in ((False, (0.5, 0.9, 5)), (True, (0.8, 1.0, 0))):
            model = Model(written("4"))
            async with served(model, sampling=Sampling(64, temperature=0.8), fixed_sampling=fixed) as (_, _, http):
                await ask(http, USER, **asked)
                await ask(http, USER)
            used = model.samplings[0]
            assert (used.temperature, used.top_p, used.top_k) == drawn
            assert (used.max_new_tokens, used.seed) == (7, 3)
            assert set(stops) == set(used.stop_token_ids or ())
            assert model.samplings[1].max_new_tokens == 64

    run(work)


def test_parts_developer_messages_and_token_ids() -> None:
    async def work() -> None:
        model = Model(written("4"))
        async with served(model) as (_, _, http):
            parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
            reply = await ask(
                http,
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": parts},
                return_token_ids=True,
                logprobs=True,
            )
        assert decoded(model.prompts[0]).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<"
        )
        choice = reply["choices"][0]
        assert choice["token_ids"] == model.answers[0]
        assert choice["weight_versions"] == [3] * len(model.answers[0])
        assert reply["prompt_token_ids"] == model.prompts[0]
        assert choice["logprobs"]["content"][0]["token"] == "4"
        assert {each["logprob"] for each in choice["logprobs"]["content"]} == {-0.5}

    run(work)


def test_tokens_that_sampling_excludes_are_left_out() -> None:
    """A rollout in this process gives them the log-prob -inf, which is no JSON."""

    class Excluding(Model):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            completion = await super().generate(prompt_ids, sampling)
            top = TopTokens((completion.tokens[0], 3, 4), (-0.1, -2.0, -math.inf))
            return replace(completion, top=(top,) * len(completion.tokens))

    async def main() -> None:
        async with served(Excluding(written("4"))) as (_, session, http):
            reply = await ask(http, USER, logprobs=True, top_logprobs=3)
            tops = [entry["top_logprobs"] for entry in reply["choices"][0]["logprobs"]["content"]]
            assert tops
            assert all([each["logprob"] for each in top] == [-0.1, -2.0] for top in tops)
            body = {"model": "policy", "prompt": "4", "logprobs": 3}
            text = (await http.post("/completions", json=body)).json()["choices"][0]["logprobs"]["top_logprobs"]
            assert all(-math.inf not in top.values() for top in text)
            assert session.counts == {"requests": 2}

    run(main)
