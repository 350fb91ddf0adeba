"""A tiny model that learns the sums of the taskset from an oracle, through a harness, and the environments in which it does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig

from areal.chat import Chat, ToolCall
from areal.inference import Sampling
from areal.inference.gateway import Gateway
from areal.inference.protocol import Completion
from areal.integrations.verifiers import VerifiersEpisode
from areal.tests.agents.pupil import Pupil
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import answer_of, calculator
from areal.tests.unit.chat.chat_models import write_chat_model
from areal.tests.unit.chat.tokenizers import chat_tokenizer
from areal.trainer.rollout import Plan, Runner
from areal.trainer.rollout.plan import Group

_QWEN = ("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_RESULT = re.compile(r"(?:<\|im_start\|>tool\n|<tool_response>\n)(\d+)")


def tokenizer() -> Any:
    """Return a tokenizer of single characters with the markers of Qwen3, which the package renderers knows."""
    made = chat_tokenizer(templates.CHATML)
    made.add_tokens(list(_QWEN))
    return made


class Oracle:
    """Client that adds by the tool of a harness: two numbers, then the third, then it answers."""

    version = 0

    def __init__(self, harness: str) -> None:
        self._harness, self._chat = harness, Chat(tokenizer(), [calculator])

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Answer the last message."""
        text = str(self._chat.template.tokenizer.decode(list(prompt_ids)))
        results = _RESULT.findall(text)
        found = re.search(r"Add (\d), (\d) and (\d)\.", text)
        assert found is not None, text
        a, b, c = found.groups()
        message = self.message(results, a, b, c)
        tokens = tuple(answer_of(self._chat, message))
        return Completion(tokens, (0.0,) * len(tokens), (0,) * len(tokens), "stop", sampling)

    def message(self, results: list[str], a: str, b: str, c: str) -> dict[str, Any]:
        """Return the answer to the results of the tool so far."""
        if len(results) == 2:
            return {"content": f"It is {results[1]}."}
        expression = f"{results[0]}+{c}" if results else f"{a}+{b}"
        by_shell = ToolCall("bash", {"command": f"echo $(({expression}))"})
        call = by_shell if self._harness == "bash" else ToolCall("add", {"expression": expression})
        return {"tool_calls": [call.message()]}


def environment(harness: str, *, tools: bool = True) -> dict[str, Any]:
    """Return the configuration of the sums with a harness, on this machine."""
    options = {"edit": False, "compaction": None} if harness == "bash" else {}
    agent = {"harness": {"id": harness, **options}, "runtime": {"type": "subprocess"}}
    return {"taskset": {"id": "areal_sums", "tools": tools and harness != "bash"}, "agent": agent}


def episode(harness: str, client: vf.ClientConfig | None = None, **options: Any) -> VerifiersEpisode:
    """Return an episode of the sums."""
    return VerifiersEpisode(environment(harness, **options), Gateway(tokenizer(), Sampling(96)), client=client)


def token_client(folder: Path) -> vf.ClientConfig:
    """Return a client that renders by the package renderers and sends tokens."""
    return vf.TrainClientConfig(renderer_model_name=str(folder), renderer=Qwen3RendererConfig())


def play(
    client: Any, made: VerifiersEpisode, groups: int = 3, group_size: int = 1, seconds: float = 300
) -> list[Group]:
    """Run an episode by a runner. Returns the groups of one batch, none of whose episodes failed."""
    runner = Runner(client, made, made.tasks(), Plan(groups, group_size, max_concurrent=512, shuffle=False))
    try:
        runner.advance(0)
        batch = runner.next_batch(seconds)
    finally:
        runner.close()
    assert not [group.traceback for group in batch if group.failed]
    return batch


def write_model(folder: Path) -> None:
    """Write a Qwen3 of two layers and its tokenizer."""
    write_chat_model(folder, tokenizer(), width=64)


def untaught(folder: Path, steps: int = 1) -> Pupil:
    """Return an engine for a number of steps, and a rollout, both with the weights in ``folder``."""
    return Pupil.untaught(str(folder), steps)


def taught(folder: Path, harness: str, client: vf.ClientConfig | None = None, steps: int = 300) -> Pupil:
    """Train a model on what the oracle says to a harness. ``folder`` has the model."""
    lessons = [each for group in play(Oracle(harness), episode(harness, client)) for each in group.sequences]
    assert [each.reward for each in lessons] == [1.0] * 3
    pupil = untaught(folder, steps)
    pupil.learn([each.segments for each in lessons], steps)
    return pupil
