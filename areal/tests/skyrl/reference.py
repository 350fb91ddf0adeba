"""A plain torch loop in float64 for the requests of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from skyrl.tinker import types
from skyrl.utils.storage import download_and_unpack
from torch import Tensor

from areal.tests.skyrl.requests import ADAM
from areal.tests.unit.tinker.backends.reference import Reference
from areal.tinker.backends.prepared import Datum


class PlainModel:
    """A model of SkyRL as transformers and ``torch.optim.AdamW`` train it.

    Args:
        archive: snapshot for the sampler with the first weights.
        lora: description of the adapter.
    """

    def __init__(self, archive: Path, lora: types.LoraConfig) -> None:
        with download_and_unpack(archive) as folder:
            self._model = Reference(folder, lora.alpha / lora.rank)
        self.weights = self._model.weights
        self._optimizer = torch.optim.AdamW(
            list(self.weights.values()),
            lr=ADAM["learning_rate"],
            betas=(ADAM["beta1"], ADAM["beta2"]),
            eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
        )

    def run(self, request: types.ForwardBackwardInput) -> list[tuple[Tensor, Tensor]]:
        """Add the gradient of a request. Returns the loss and the log-prob of each target, by sample."""
        outputs = []
        for item in request.data:
            inputs = item.loss_fn_inputs
            tokens = [token for chunk in item.model_input.chunks for token in chunk.tokens]
            logprobs = self._model.logprobs(Datum(tokens, inputs.target_tokens.data, {}))
            losses = torch.tensor(inputs.weights.data).double() * _loss(request, inputs, logprobs)
            losses.sum().backward()
            outputs.append((losses.detach(), logprobs.detach()))
        return outputs

    def step(self) -> float:
        """Take a step. Returns the norm of the gradient."""
        norm = torch.stack([x.grad.norm() for x in self.weights.values()]).norm()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def _loss(request: types.ForwardBackwardInput, inputs: types.LossFnInputs, logprobs: Tensor) -> Tensor:
    """Return the loss of each target without its weight."""
    if request.loss_fn == "cross_entropy":
        return -logprobs
    sampled, advantages = (torch.tensor(x.data).double() for x in (inputs.logprobs, inputs.advantages))
    ratio = (logprobs - sampled).exp()
    if request.loss_fn == "importance_sampling":
        return -ratio * advantages
    config: dict[str, Any] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, **(request.loss_fn_config or {})}
    bounded = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    if request.loss_fn == "cispo":
        return -bounded.detach() * logprobs * advantages
    return -torch.minimum(ratio * advantages, bounded * advantages)
