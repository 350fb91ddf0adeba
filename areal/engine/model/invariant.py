"""Models whose log-probs can be computed with the same bits in any batch, and torch's own switches on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PretrainedConfig

INVARIANT_FAMILIES = frozenset({"deepseek_v3", "gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe"})
"""Model types whose bits the tests compare over batches."""

EXPERTS = "eager"
"""Implementation of experts: one product for each expert, whose rows the rules of batch invariance cut into tiles."""

_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables of the environment with which cuBLAS does not split sums over blocks."""


def check_invariant_model(config: PretrainedConfig, option: str, families: frozenset[str] = INVARIANT_FAMILIES) -> None:
    """Raise if no test shows that a model's bits do not depend on the batch.

    Args:
        config: configuration of the model.
        option: name of the option, for the error.
        families: supported model types.

    Raises:
        ValueError: the model type is not one of them, or its logits are scaled or capped.
    """
    if config.model_type not in families:
        raise ValueError(
            f"{option} = True with model_type = {config.model_type!r}: choose one of {', '.join(sorted(families))}, or leave it out"
        )
    names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
    scaled = next((name for name in names if getattr(config, name, None) not in (None, 1.0)), None)
    if scaled is not None:
        raise ValueError(
            f"{option} = True with {scaled} = {getattr(config, scaled)} in config.json: scaled logits are not supported; leave it out"
        )


def switch_gpu_to_fixed_sums() -> None:
    """Set torch's and cuBLAS's switches that keep a product's order of summation, for this process.

    torch has no mode of its own in which the bits of a row do not depend on the batch: this was not run on a GPU.
    """
    # Read when a process calls cuBLAS first. Values of the user stay.
    for name, value in _CUBLAS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.preferred_blas_library("cublaslt")
