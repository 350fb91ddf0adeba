"""Requests, and a plain torch model in float64 that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal.tests.grid.models import VOCAB, model_dir
from areal.tinker.backends.prepared import AdamParams, AdapterSpec, Datum, PassResult, PreparedBatch
from areal.tinker.backends.training.engine_backend import EngineBackend

PREFIX = "base_model.model."
LENGTHS = (7, 30, 1, 12, 22)
"""Lengths of the samples of a request: several micro-batches of 64 tokens."""
STEP = AdamParams(learning_rate=0.01)


def datum(length: int, seed: int, *names: str, targets: int = 0) -> Datum:
    """Return a sample with random values of these names and ``targets`` targets per position (0 for an array ``[T]``)."""
    random = np.random.default_rng((length, seed))
    shape = (length, targets) if targets else (length,)
    input_ids, target_ids = random.integers(0, VOCAB, length), random.integers(0, VOCAB, shape)
    values = {name: random.normal(size=shape).astype(np.float32) for name in names}
    if "logprobs" in values:
        values["logprobs"] = values["logprobs"] - 4
    if "sequence_ratio_mask" in values:
        values["sequence_ratio_mask"] = (values["sequence_ratio_mask"] > -0.5).astype(np.float32)
        values["sequence_ratio_mask"][0] = 1
    return Datum(input_ids, target_ids, values)


def data(*names: str, seed: int = 0, lengths: Sequence[int] = LENGTHS, targets: int = 0) -> list[Datum]:
    return [datum(length, seed, *names, targets=targets) for length in lengths]


def request(model_id: str, samples: Sequence[Datum], loss: str = "cross_entropy", **config: float) -> PreparedBatch:
    return PreparedBatch(model_id, samples, loss, config)


def scaled(samples: Sequence[Datum], factor: float, key: str = "weights") -> list[Datum]:
    """Return samples whose values of one key are multiplied."""
    return [
        Datum(each.input_ids, each.target_ids, {**each.values, key: (each.values[key] * factor).astype(np.float32)})
        for each in samples
    ]


def run(backend: EngineBackend, *batches: PreparedBatch) -> PassResult:
    """Run requests, none of which may fail, in one call of forward_backward, and return the result of the first."""
    results = backend.forward_backward(batches)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert isinstance(results[0], PassResult)
    return results[0]


def trained(backend: EngineBackend, model_id: str, rank: int = 4, seed: int = 7, steps: int = 1, **kinds: bool) -> str:
    """Create a model and take some steps, so that its ``B`` is not zero."""
    backend.create_model(model_id, AdapterSpec(rank, seed=seed, **kinds))
    for number in range(steps):
        run(backend, request(model_id, data("weights", seed=100 + number)))
        backend.optim_step(model_id, STEP)
    return model_id


def gradients(backend: EngineBackend, model_id: str) -> dict[str, Tensor]:
    """Return the pending gradients of a model, which becomes the selected one."""
    slot = backend.models[model_id]
    assert slot.pending
    backend._select(slot.name)
    return {name: x.clone() for name, x in backend.group.named_gradients()}


def weights(backend: EngineBackend, model_id: str) -> dict[str, Tensor]:
    """Return the weights of a model, which becomes the selected one."""
    backend._select(backend.models[model_id].name)
    return {name: x.clone() for name, x in backend.group.adapters.named_tensors()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Reference:
    """The tiny model with an adapter in float64, by hooks on its linear layers.

    Args:
        folder: adapter in peft's format.
        scale: scale of the adapter.
    """

    def __init__(self, folder: Path, scale: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float64).eval()
        self.weights = {
            name: x.double().requires_grad_() for name, x in load_file(folder / "adapter_model.safetensors").items()
        }
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and f"{PREFIX}{name}.lora_A.weight" in self.weights:
                module.register_forward_hook(self._adds(f"{PREFIX}{name}", scale))

    def _adds(self, name: str, scale: float) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            down, up = (self.weights[f"{name}.lora_{factor}.weight"] for factor in "AB")
            return output + scale * (inputs[0] @ down.t()) @ up.t()

        return hook

    def logprobs(self, sample: Datum) -> Tensor:
        """Return the log-probs of the targets, in their shape."""
        logits = self.model(torch.tensor(sample.input_ids)[None]).logits[0]
        targets = torch.tensor(sample.target_ids)
        chosen = logits.log_softmax(-1).gather(1, targets.reshape(len(targets), -1))
        return chosen.reshape(targets.shape)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.weights, torch.autograd.grad(loss, list(self.weights.values())), strict=True))
