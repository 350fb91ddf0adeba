"""Requests as SkyRL's engine hands them to a backend, made by SkyRL's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from skyrl.tinker import types
from skyrl.tinker.engine import prepare_model_pass_batch, prepare_sample_batch

from areal.integrations.skyrl.backend import ArealBackend
from areal.tests.grid.models import VOCAB

LENGTHS = (7, 30, 12)
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LOSSES: Mapping[str, Mapping[str, float] | None] = {
    "cross_entropy": None,
    "importance_sampling": None,
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
}
"""Losses of the requests of a step, with their configuration."""


def lora(rank: int = 4, alpha: float = 16.0, **fields: Any) -> types.LoraConfig:
    return types.LoraConfig(rank=rank, alpha=alpha, **{"seed": 3, **fields})


def text(tokens: Sequence[int]) -> types.ModelInput:
    """Return a model input in two chunks."""
    half = len(tokens) // 2
    return types.ModelInput(
        chunks=[types.EncodedTextChunk(tokens=list(part)) for part in (tokens[:half], tokens[half:])]
    )


def datum(length: int, seed: int, *names: str, **values: Sequence[float]) -> types.Datum:
    """Return a sample with random inputs of these names, of which ``values`` replaces some."""
    random = np.random.default_rng((length, seed))
    tokens, targets = (random.integers(0, VOCAB, length).tolist() for _ in range(2))
    drawn = {
        "weights": random.random(length) if "weights" in names else np.ones(length),
        "logprobs": random.normal(size=length) - 5 if "logprobs" in names else np.zeros(0),
        "advantages": random.normal(size=length) if "advantages" in names else np.zeros(0),
    }
    inputs = {name: types.TensorData(data=list(values.get(name, array.tolist()))) for name, array in drawn.items()}
    return types.Datum(
        loss_fn_inputs=types.LossFnInputs(target_tokens=types.TensorData(data=targets), **inputs),
        model_input=text(tokens),
    )


def request(
    loss: str, seed: int, config: Mapping[str, float] | None = None, **values: Sequence[float]
) -> types.ForwardBackwardInput:
    """Return a request with samples of several lengths, all with weights."""
    names = ("weights",) if loss == "cross_entropy" else ("weights", "logprobs", "advantages")
    return types.ForwardBackwardInput(
        data=[datum(length, seed, *names, **values) for length in LENGTHS],
        loss_fn=loss,
        loss_fn_config=None if config is None else dict(config),
    )


def run(
    backend: ArealBackend, requests: Mapping[str, tuple[str, types.ForwardBackwardInput]], *, train: bool = True
) -> dict[str, Any]:
    """Run requests, by id, of models in one batch."""
    batch = prepare_model_pass_batch(dict(requests))
    return (backend.forward_backward if train else backend.forward)(batch)


def step(backend: ArealBackend, model: str, **adam: float) -> Mapping[str, float]:
    params = types.AdamParams(**{**ADAM, **adam})
    metrics = backend.optim_step(model, types.OptimStepInput(adam_params=params)).metrics
    assert metrics is not None
    return metrics


def sample(
    backend: ArealBackend, base: Any, requests: Mapping[str, tuple[str, types.SampleInput]]
) -> dict[str, types.SampleOutput | types.ErrorResponse]:
    return backend.sample(prepare_sample_batch(dict(requests), base))


def question(snapshot: str = "", *, answers: int = 1, scored: bool = False, **params: Any) -> types.SampleInput:
    """Return a request for samples of a snapshot, or of the base model."""
    return types.SampleInput(
        base_model=None if snapshot else "base",
        prompt=text([5, 6, 7, 8]),
        sampling_params=types.SamplingParams(**{"temperature": 1.0, "max_tokens": 6, "seed": 1, **params}),
        num_samples=answers,
        checkpoint_id=snapshot,
        prompt_logprobs=scored,
    )
