"""Models whose log-probs can be computed with the same bits in any batch."""

from __future__ import annotations

from transformers import PretrainedConfig

INVARIANT_FAMILIES = frozenset({"deepseek_v3", "gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe"})
"""Model types whose bits the tests compare over batches."""

EXPERTS = "eager"
"""Implementation of experts: one product for each expert, whose rows the rules of batch invariance cut into tiles."""


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
