"""The published OpenAI client and the published OpenAI Agents SDK, unmodified, in front of a model that has learned their tool loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

pytest.importorskip("openai", reason="openai is not installed: make test-agents")
pytest.importorskip("agents", reason="openai-agents is not installed: make test-agents")

import agents
import openai

from areal.inference.gateway import Gateway
from areal.inference.protocol import Sampling
from areal.tests.agents.pupil import QUESTIONS, Oracle, Program, Pupil, sampled, tokenizer
from areal.tests.unit.chat.agents import calculator

REPEATS = 5


async def client_program(base_url: str, question: str, *, stream: bool = False) -> str:
    """A loop with tools by the client alone."""
    messages: list[Any] = [{"role": "user", "content": question}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        while True:
            made = client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[get_json_schema(calculator)],
                stream=stream,  # type: ignore[call-overload]
            )
            message = (
                await _collected(await made)
                if stream
                else (await made).choices[0].message.model_dump(exclude_none=True)
            )
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for call in message["tool_calls"]:
                try:
                    result = calculator(**json.loads(call["function"]["arguments"]))
                except (TypeError, ValueError) as error:
                    result = str(error)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _collected(stream: Any) -> dict[str, Any]:
    """Return the message of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    async for chunk in stream:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
    return message if message["tool_calls"] else {"role": "assistant", "content": message["content"]}


async def streaming_program(base_url: str, question: str) -> str:
    return await client_program(base_url, question, stream=True)


@agents.function_tool
def add(expression: str) -> str:
    """Compute an expression.

    Args:
        expression: sum, such as 2+2.
    """
    return calculator(expression)


add.name = "calculator"


async def sdk_program(base_url: str, question: str) -> str:
    """A run of the OpenAI Agents SDK."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = agents.OpenAIChatCompletionsModel(model="any", openai_client=client)
        agent: Any = agents.Agent(name="Adder", instructions="Use the calculator.", tools=[add], model=model)
        config = agents.RunConfig(tracing_disabled=True)
        return str((await agents.Runner.run(agent, question, run_config=config, max_turns=6)).final_output)


PROGRAMS: dict[str, Program] = {
    f"openai {openai.__version__}": client_program,
    "openai, streams": streaming_program,
    "openai-agents": sdk_program,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_tool_loop_trains_on_the_tokens_that_were_sampled(
    name: str, tmp_path: Path, report: Callable[..., None]
) -> None:
    program = PROGRAMS[name]
    pupil = Pupil.taught(tmp_path, program)
    found = asyncio.run(sampled(pupil.rollout, program, REPEATS))
    sequences = [each for _, recorded in found for each in recorded]
    worst = pupil.error(sequences)
    report(name, len(found), sequences, worst)
    assert worst < 1e-5
    # The model has learned the loop: most runs call the tool and repeat its result, each in one sequence.
    right = [f"It is {sum(map(int, sum_.split('+')))}." for sum_ in QUESTIONS.values()]
    good = [recorded for result, recorded in found if result in right]
    assert len(good) > len(found) / 2
    assert all(len(recorded) == 1 for recorded in good)
    assert all(sum(segment.trainable for segment in recorded[0].segments) == 2 for recorded in good)
    pupil.close()


def test_update_in_mid_session_keeps_versions_per_token(tmp_path: Path) -> None:
    pupil = Pupil.taught(tmp_path, client_program)

    class Updating:
        """Updates the rollout behind the first answer."""

        version = 0

        async def generate(self, prompt_ids: Any, sampling: Sampling) -> Any:
            answer = await pupil.rollout.generate(prompt_ids, sampling)
            pupil.rollout.update(pupil.engine.named_tensors(), pupil.rollout.version + 1)
            return answer

    async def once() -> Any:
        async with Gateway(tokenizer(), Sampling(96), models=None) as gateway:
            with gateway.session(Updating(), max_requests=8) as session:
                await client_program(session.base_url, next(iter(QUESTIONS)))
        return session.sequences()

    answers = [each for sequence in asyncio.run(once()) for each in sequence.segments if each.trainable]
    assert [set(each.values["versions"].tolist()) for each in answers] == [
        {1 + number} for number in range(len(answers))
    ]
    pupil.close()


def test_errors_have_the_types_of_the_client() -> None:
    async def once() -> None:
        async with Gateway(tokenizer(), Sampling(96)) as gateway:
            with gateway.session(Oracle()) as session:
                client = openai.AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0)
                ask: Any = client.chat.completions.create
                messages = [{"role": "user", "content": "Add 2 and 3."}]
                with pytest.raises(openai.NotFoundError, match="gpt-4o"):
                    await ask(model="gpt-4o", messages=messages)
                with pytest.raises(openai.BadRequestError, match="temperature = 0"):
                    await ask(model="policy", messages=messages, temperature=0)
                assert [each.id async for each in client.models.list()] == ["policy"]
            with pytest.raises(openai.APIStatusError, match="has ended"):
                await ask(model="policy", messages=messages)
            await client.close()

    asyncio.run(once())
