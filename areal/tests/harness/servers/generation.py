"""Tokens of the test servers: one plain forward over the full text for each token."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


class Drawing(BaseModel):
    """One generation request, from either kind of route.

    Attributes:
        by_position: the seed is combined with the position, as SGLang does.
        raw: log-probs are those of the model, before temperature, ``top_p`` and ``top_k``.
        model: name of the served model or of an adapter.
    """

    name: str
    prompt: list[int]
    length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    stop: list[int]
    seed: int
    by_position: bool
    raw: bool = False
    model: str | None = None


@dataclass
class Drawn:
    """Tokens of a request, with log-prob and label of the weights of each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    finish: str = "length"


def load(path: str) -> PreTrainedModel:
    """Load a model in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def merged(model: PreTrainedModel, tensors: dict[str, Tensor], config: dict[str, Any]) -> PreTrainedModel:
    """Return a copy of the model whose weights have an adapter's product added."""
    result = copy.deepcopy(model)
    for name in [each for each in tensors if each.endswith(".lora_A.weight")]:
        stem = name.removesuffix(".lora_A.weight")
        layer: Any = result.get_submodule(stem.removeprefix("base_model.model."))
        product = tensors[f"{stem}.lora_B.weight"].float() @ tensors[name].float()
        layer.weight = torch.nn.Parameter(layer.weight.data + config["lora_alpha"] / config["r"] * product)
    return result.eval()


@torch.no_grad()
def one(model: PreTrainedModel, text: list[int], asked: Drawing, generator: torch.Generator) -> tuple[int, float]:
    """Draw one token. With weights that are not finite, token 0 has the log-prob NaN."""
    logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1].float()
    if not torch.isfinite(logits).all():
        return 0, float("nan")
    raw = logits.log_softmax(-1)
    if asked.temperature == 0:
        token = int(logits.argmax())
        return token, float(raw[token])
    logits = logits / asked.temperature
    if asked.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(asked.top_k).values[-1], -torch.inf)
    if asked.top_p < 1:
        ordered, places = logits.softmax(-1).sort(descending=True)
        logits[places[ordered.cumsum(-1) - ordered >= asked.top_p]] = -torch.inf
    token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return token, float((raw if asked.raw else logits.log_softmax(-1))[token])
