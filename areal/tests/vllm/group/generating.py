"""Tokens of a vLLM server with their log-probs and weight versions, compared with a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from areal.tests.vllm.server import send

PROMPT = [1, 2, 3, 4, 5]
TOLERANCE = 1e-5
"""Of a log-prob of an answer of 16 tokens."""


class Generated(NamedTuple):
    """One answer of ``/inference/v1/generate``: tokens, their log-probs, and the label of the weights of each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    labels: list[str]


def generate(url: str, length: int, seed: int = 0, prompt: list[int] | None = None) -> Generated:
    """Generate an answer."""
    prompt = prompt or PROMPT
    drawing: dict[str, Any] = {"max_tokens": length, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    drawing |= {"repetition_penalty": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    status, body = send(url, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": drawing}, "POST")
    assert status == 200, body
    choice = body["choices"][0]
    labels = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
    return Generated(prompt, choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]], labels)


@torch.no_grad()
def differences(answer: Generated, model: PreTrainedModel) -> torch.Tensor:
    """Return the absolute difference of each served log-prob from that of a model."""
    rows = model(torch.tensor([[*answer.prompt, *answer.tokens]]), use_cache=False).logits[0].float().log_softmax(-1)
    own = rows[len(answer.prompt) - 1 : -1].gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return (own - torch.tensor(answer.logprobs)).abs()


def served_error(url: str, model: PreTrainedModel, version: int, length: int = 16) -> float:
    """Return the largest difference over an answer, all of whose tokens must have one version."""
    answer = generate(url, length, seed=version)
    assert {label.rpartition("/")[2] for label in answer.labels} == {str(version)}, answer.labels
    return float(differences(answer, model).max())
