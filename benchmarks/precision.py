"""Errors of log-probs and gradients against float64, for each number format and family.

python -m benchmarks.precision

With torchao, also those of float8 products, emulated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from areal import FinetuneSpec, FSDPConfig, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import Float8Config, QuantizationConfig, TokenOutputs


@dataclass(frozen=True)
class Settings:
    """Command-line options."""

    hidden: int = 256
    """Width of the models, a multiple of 128."""
    layers: int = 4
    """Number of layers of the models."""
    sequences: int = 8
    """Sequences of 32 to 256 tokens."""


FLOAT64: Mapping[str, Any] = {"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}
FORMATS: tuple[str, ...] = get_args(QuantizationConfig.model_fields["format"].annotation)
RECIPES: tuple[str, ...] = get_args(Float8Config.model_fields["recipe"].annotation)


def family_configs(settings: Settings) -> dict[str, PreTrainedConfig]:
    """Return the configuration of each family's model."""
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": settings.hidden,
        "intermediate_size": 2 * settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.hidden // 64,
        "num_key_value_heads": max(1, settings.hidden // 128),
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    experts: dict[str, Any] = {"moe_intermediate_size": settings.hidden, "num_experts": 8, "num_experts_per_tok": 2}
    return {
        "llama": LlamaConfig(**sizes),
        "qwen3": Qwen3Config(**sizes),
        "qwen3_moe": Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True),
    }


def options_of(kind: str) -> dict[str, Any]:
    """Return the configuration that computes in a format; ``bfloat16`` and ``float32`` round nothing else."""
    if kind in ("float64", "float32"):
        return dict(FLOAT64) if kind == "float64" else {"dtype": "float32"}
    if kind in FORMATS:
        return {"fsdp": FSDPConfig(quantization=QuantizationConfig.model_validate({"format": kind}))}
    if kind in RECIPES:
        return {"fsdp": FSDPConfig(float8=Float8Config.model_validate({"recipe": kind, "emulate": True}))}
    return {}


def loss(outputs: TokenOutputs, mb: Any) -> Tensor:
    """Return the negative log-likelihood of all tokens."""
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum()


def computed(path: str, batch: list[dict[str, Tensor]], options: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of all tokens, and the gradient of their mean, in float64."""
    config = TrainEngineConfig(path=path, optimizer=OptimizerConfig(gradient_clipping=None), **options)
    with create_engine(config) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=1))
        logprobs = torch.cat([each.double() for each in engine.forward_batch(batch)])
        engine.forward_backward(batch, loss)
        return logprobs, {name: grad.double().clone() for name, grad in engine.named_gradients()}


def distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to the second one."""
    squares = [(found[name] - grad).square().sum() for name, grad in exact.items()]
    norms = [grad.square().sum() for grad in exact.values()]
    return (torch.stack(squares).sum() / torch.stack(norms).sum()).sqrt().item()


def rows_of(path: str, settings: Settings) -> dict[str, tuple[float, float]]:
    """Return for each format the mean error of a log-prob in nats, and the relative error of the gradient."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, 257, (settings.sequences,), generator=generator).tolist()
    batch = [{"input_ids": torch.randint(0, 2048, (length,), generator=generator)} for length in lengths]
    exact, gradient = computed(path, batch, options_of("float64"))
    rows = {}
    for kind in ("float32", "bfloat16", *FORMATS, *(RECIPES if find_spec("torchao") else ())):
        logprobs, grads = computed(path, batch, options_of(kind))
        rows[kind] = ((logprobs - exact).abs().mean().item(), distance(grads, gradient))
    return rows


def main(settings: Settings) -> None:
    """Print the table."""
    print("| family | format | log-prob error (nats) | gradient error |\n|---|---|---|---|")
    for family, config in family_configs(settings).items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(Path(folder))
            for kind, (logprob, grad) in rows_of(folder, settings).items():
                print(f"| {family} | {kind} | {logprob:.1e} | {grad:.1e} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))
