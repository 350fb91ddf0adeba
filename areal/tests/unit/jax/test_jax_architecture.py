"""Architectures that the JAX engine reads from configurations: windows of layers, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import numpy as np
import torch
from transformers import AutoConfig

from areal.engine.jax.model.architecture import UNLIMITED, Architecture, meta_model
from areal.engine.jax.model.spec import ModelSpec
from areal.tests.harness.tiny import config

KINDS = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 5, "use_sliding_window": True}


def architecture(family: str, **changes: Any) -> Architecture:
    return Architecture.of(meta_model(AutoConfig.for_model(family, num_hidden_layers=2, **changes), torch.float32))


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", (UNLIMITED, UNLIMITED)),
        ("mistral", (5, 5)),
        ("qwen2", (5, UNLIMITED)),
        ("qwen3", (5, UNLIMITED)),
        ("qwen3_moe", (5, 5)),
    ],
)
def test_window_is_read_as_the_family_reads_it(family: str, windows: tuple[int, ...]) -> None:
    assert architecture(family, layer_types=KINDS, **WINDOW).windows == windows


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_batch_are_refused(kind: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **(factors if kind == "longrope" else {})}
    with pytest.raises(ValueError, match=f"rope_type = '{kind}': .* choose a fixed rope_type in config.json"):
        architecture("llama", rope_parameters=rope)


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_deterministic_kernels_of_a_gpu_are_a_switch_of_the_process(platform: str) -> None:
    mesh = cast(Any, SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)])))

    def spec() -> ModelSpec:
        return ModelSpec.of(config("jax:d1", deterministic=True), architecture("llama"), mesh, 0)

    if platform == "cpu":
        spec()
        return
    with pytest.raises(ValueError, match=r"deterministic = True .* set XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        spec()
