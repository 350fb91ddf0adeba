"""Sums of two numbers as prompts, answers and training samples, for clients of the Tinker SDK."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import tinker


class Problem(NamedTuple):
    question: str
    answer: str


def problems(count: int, seed: int) -> list[Problem]:
    """Draw sums of numbers from 0 to 99. The same seed gives the same sums."""
    draw = random.Random(seed)
    numbers = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [Problem(f"What is {a} + {b}?", str(a + b)) for a, b in numbers]


def prompt_ids(tokenizer: Any, problem: Problem) -> list[int]:
    """Return the token ids of a question in the chat format of the model, up to the beginning of the answer."""
    system = {"role": "system", "content": "Answer with just the number."}
    messages = [system, {"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def is_right(tokenizer: Any, problem: Problem, tokens: Sequence[int]) -> bool:
    """Return True if an answer is the sum and nothing else."""
    return tokenizer.decode(tokens, skip_special_tokens=True).strip() == problem.answer


def datum(prompt: Sequence[int], answer: Sequence[int], **inputs: Sequence[float]) -> tinker.Datum:
    """Return a training sample. ``inputs`` of the loss have a number for each token of the answer; those of the prompt have 0."""
    tokens = [*prompt, *answer]
    padded = {name: [0.0] * (len(prompt) - 1) + list(values) for name, values in inputs.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **padded}
    )


def new_adapter(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """Return the model that the server has, with a new adapter."""
    name = service.get_server_capabilities().supported_models[0].model_name
    return service.create_lora_training_client(str(name), rank=16, seed=0).result()


def accuracy(tokenizer: Any, training: tinker.TrainingClient, held_out: Sequence[Problem]) -> float:
    """Return the fraction of problems whose most likely answer is right, with the weights that are trained."""
    client = training.save_weights_and_get_sampling_client().result()
    greedy = tinker.SamplingParams(max_tokens=8, temperature=0, stop=[tokenizer.eos_token_id])
    prompts = [tinker.ModelInput.from_ints(prompt_ids(tokenizer, problem)) for problem in held_out]
    futures = [client.sample(prompt, 1, greedy) for prompt in prompts]
    answers = [future.result().sequences[0].tokens for future in futures]
    return sum(is_right(tokenizer, *pair) for pair in zip(held_out, answers, strict=True)) / len(held_out)
