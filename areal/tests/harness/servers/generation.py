"""Tokens of the test servers: one plain forward over the full text for each token."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.tests.harness.servers.experts import routing


class Drawing(BaseModel):
    """One generation request, from either kind of route.

    Attributes:
        by_position: the seed is combined with the position, and ``top_k`` and ``top_p`` refer to the same distribution, as in SGLang.
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
    stop_strings: list[str] = []
    raw: bool = False
    model: str | None = None


@dataclass
class Drawn:
    """Tokens of a request, with log-prob and label of the weights of each.

    Attributes:
        plain: for each token, log-probs ``[V]`` after temperature.
        drawn: those of the distribution that it was drawn from.
        experts: those of each token before the last, ``[L, K]``; empty for a model without experts.
        matched: token or string at which it stopped.
        queued: aborted while it waited for the end of a pause.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    plain: list[Tensor] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    finish: str = "length"
    matched: int | str | None = None
    queued: bool = False

    def first(self, count: int) -> Drawn:
        """Return the first tokens only."""
        lists = {name: getattr(self, name)[:count] for name in ("tokens", "logprobs", "labels", "plain", "drawn")}
        return replace(self, **lists)


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
def one(
    model: PreTrainedModel,
    text: list[int],
    asked: Drawing,
    generator: torch.Generator,
    drawn: Drawn,
    *,
    shifted_experts: bool,
) -> None:
    """Draw one token. With weights that are not finite, token 0 has the log-prob NaN."""
    with routing(model, shifted=shifted_experts) as chosen:
        logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1].float()
    if chosen:
        # A server with a cache computes each token once.
        drawn.experts += torch.stack(chosen, 1)[len(drawn.experts) :]
    raw = logits.log_softmax(-1)
    greedy = asked.temperature == 0
    plain = raw if greedy else (logits / asked.temperature).log_softmax(-1)
    kept = raw if greedy else truncated(plain, asked)
    if not torch.isfinite(logits).all():
        token = 0
    elif greedy:
        token = int(logits.argmax())
    else:
        token = int(torch.multinomial(kept.exp(), 1, generator=generator))
    drawn.tokens.append(token)
    drawn.logprobs.append(float((raw if asked.raw else kept)[token]))
    drawn.plain.append(plain)
    drawn.drawn.append(kept)


def truncated(plain: Tensor, asked: Drawing) -> Tensor:
    """Return log-probs after ``top_k`` and ``top_p``: of the rest after ``top_k``, or of all tokens as in SGLang."""
    kept = plain.clone()
    if asked.top_k > 0:
        kept = kept.masked_fill(plain < plain.topk(min(asked.top_k, len(plain))).values[-1], -torch.inf)
    if asked.top_p < 1:
        ordered, places = (plain if asked.by_position else kept).softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        kept[places[before > asked.top_p if asked.by_position else before >= asked.top_p]] = -torch.inf
    return kept.log_softmax(-1)
