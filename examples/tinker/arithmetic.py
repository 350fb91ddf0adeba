"""Sums of two numbers as prompts, answers and training samples, for clients of the Tinker protocol."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tinker

SYSTEM = "Answer with just the number."
"""System message of every prompt."""


@dataclass(frozen=True)
class Question:
    """The sum of two numbers."""

    left: int
    right: int

    @property
    def text(self) -> str:
        return f"What is {self.left} + {self.right}?"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def questions(count: int, seed: int) -> list[Question]:
    """Draw questions with numbers from 0 to 99. The same seed gives the same questions."""
    draw = random.Random(seed)
    return [Question(draw.randrange(100), draw.randrange(100)) for _ in range(count)]


def prompt_ids(tokenizer: Any, question: Question) -> list[int]:
    """Return the token ids of a question in the chat format of the model, up to the beginning of the answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def answer_ids(tokenizer: Any, question: Question) -> list[int]:
    """Return the token ids of the right answer, with the end of the turn."""
    return [*tokenizer.encode(question.answer, add_special_tokens=False), tokenizer.eos_token_id]


def is_right(tokenizer: Any, question: Question, tokens: Sequence[int]) -> bool:
    """Return True if an answer is the sum and nothing else."""
    return tokenizer.decode(tokens, skip_special_tokens=True).strip() == question.answer


def datum(prompt: Sequence[int], answer: Sequence[int], **inputs: Sequence[float]) -> tinker.Datum:
    """Return a training sample of a prompt and its answer. Position ``t`` predicts token ``t + 1``.

    Args:
        prompt: ``[P]`` token ids.
        answer: ``[A]`` token ids.
        inputs: for each name, ``[A]`` numbers for the tokens of the answer. Tokens of the prompt have 0.
    """
    given = len(prompt) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *answer[:-1]]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=[*prompt[1:], *answer], dtype="int64", shape=[given + len(answer)]),
            **{
                name: tinker.TensorData(data=[0.0] * given + list(values), dtype="float32", shape=[given + len(values)])
                for name, values in inputs.items()
            },
        },
    )


def served_model() -> str:
    """Return the name of the model that the server has."""
    capabilities = tinker.RestClient().get_server_capabilities().result()
    return str(capabilities.supported_models[0].model_name)


def accuracy(tokenizer: Any, client: tinker.SamplingClient, held_out: Sequence[Question]) -> float:
    """Return the fraction of questions whose most likely answer is right."""
    greedy = tinker.SamplingParams(max_tokens=8, temperature=0, stop=[tokenizer.eos_token_id])
    futures = [
        client.sample(tinker.ModelInput.from_ints(prompt_ids(tokenizer, question)), 1, greedy) for question in held_out
    ]
    right = [
        is_right(tokenizer, question, future.result().sequences[0].tokens)
        for question, future in zip(held_out, futures, strict=True)
    ]
    return sum(right) / len(right)
