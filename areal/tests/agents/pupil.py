"""A tiny model that learns a program's tool loop from an oracle, through the gateway, and a table of what it samples there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen3ForCausalLM

from areal import FinetuneSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import TrainEngine
from areal.chat import Chat, ToolCall
from areal.inference import LocalRollout, Sampling
from areal.inference.gateway import Gateway
from areal.inference.gateway.recording import SampledSequence
from areal.inference.protocol import Completion
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import answer_of, calculator
from areal.tests.unit.chat.chat_models import write_chat_model
from areal.tests.unit.chat.tokenizers import chat_tokenizer
from areal.trainer.losses import sft_objective
from areal.utils.data.sequences import Segment, from_segments, where_trained

Program = Callable[[str, str], Awaitable[str]]
"""An agent: from its base URL and a question to its answer."""

QUESTIONS = {"Add 2 and 3.": "2+3", "Add 4 and 5.": "4+5", "Add 1 and 7.": "1+7"}
"""Questions with the sums that the model is to compute by the tool."""
CONTEXT = 2048
"""Context length."""


def tokenizer() -> Any:
    """Return a tokenizer of single characters with a template that has tools."""
    return chat_tokenizer(templates.CHATML)


class Oracle:
    """Client that calls the calculator, and repeats its result."""

    version = 0

    def __init__(self) -> None:
        self._chat = Chat(tokenizer(), [calculator])

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Answer the last message."""
        text = str(self._chat.template.tokenizer.decode(list(prompt_ids)))
        result = re.search(r"<\|im_start\|>tool\n(\d+)<\|im_end\|>\n<\|im_start\|>assistant\n$", text)
        expression = next(sum_ for question, sum_ in QUESTIONS.items() if question in text)
        call = ToolCall("calculator", {"expression": expression})
        message = {"content": f"It is {result[1]}."} if result else {"tool_calls": [call.message()]}
        tokens = tuple(answer_of(self._chat, message))
        return Completion(tokens, (0.0,) * len(tokens), (0,) * len(tokens), "stop", sampling)


async def sampled(
    client: Any, program: Program, repeats: int = 1, **options: Any
) -> list[tuple[str, list[SampledSequence]]]:
    """Run a program on each question at the same time. Returns its answers with what was sampled."""
    found = []

    async def once(gateway: Gateway, question: str) -> None:
        with gateway.session(client, max_requests=8) as session:
            result = await program(session.base_url, question)
        found.append((result, session.sequences()))

    async with Gateway(tokenizer(), Sampling(96), models=None, **options) as gateway:
        await asyncio.gather(*(once(gateway, question) for question in QUESTIONS for _ in range(repeats)))
    return found


@dataclass
class Pupil:
    """An engine that has learned the loop, and a rollout with its weights."""

    engine: TrainEngine
    rollout: LocalRollout

    @classmethod
    def untaught(cls, folder: str, steps: int = 1) -> Pupil:
        """Return an engine for a number of steps, and a rollout, both with the weights in ``folder``."""
        config = TrainEngineConfig(path=folder, backend="fsdp:d1", dtype="float32", optimizer=OptimizerConfig(lr=3e-3))
        engine = create_engine(config)
        engine.initialize(FinetuneSpec(total_train_steps=steps))
        model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        return cls(engine, LocalRollout(model, max_context=CONTEXT, max_requests=16))

    @classmethod
    def taught(cls, path: Path, program: Program, steps: int = 240) -> Pupil:
        """Train a model on what the oracle says to a program, until it does the same."""
        folder, _ = write_chat_model(path, width=64)
        lessons = asyncio.run(sampled(Oracle(), program))
        pupil = cls.untaught(folder, steps)
        pupil.learn([each.segments for _, sequences in lessons for each in sequences], steps)
        return pupil

    def learn(self, lessons: Sequence[Sequence[Segment]], steps: int) -> None:
        """Train on sequences, and give the weights to the rollout as version 1."""
        samples = [from_segments(each) for each in lessons]
        batch = [{name: sample[name] for name in ("input_ids", "loss_mask")} for sample in samples]
        for _ in range(steps):
            self.engine.train_batch(batch, sft_objective())
        self.rollout.update(self.engine.named_tensors(), 1)

    def error(self, sequences: Sequence[SampledSequence]) -> float:
        """Return the largest difference between log-probs of the trainer and of the rollout, over all sampled tokens, in nats."""
        worst = 0.0
        for each in sequences:
            sample = where_trained(from_segments(each.segments))
            batch = [{name: sample[name] for name in ("input_ids", "temperature") if name in sample}]
            (logprobs,) = self.engine.forward_batch(batch)
            trained = sample["loss_mask"] > 0
            worst = max(worst, float((logprobs - sample["rollout_logprobs"])[trained].abs().max()))
        return worst

    def close(self) -> None:
        self.rollout.close()
        self.engine.destroy()
