"""Models that take images, videos or sound besides text: engines train them on text alone, or refuse them."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_TOWERS = ("vision_config", "audio_config")
_PLACEHOLDERS = tuple(f"{medium}_token_{form}" for medium in ("image", "video", "audio") for form in ("id", "index"))


def takes_media(config: PretrainedConfig) -> bool:
    """Return whether a model takes images, videos or sound."""
    towers = any(getattr(config, tower, None) is not None for tower in _TOWERS)
    return towers or config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def check_media(config: PretrainedConfig, *, text_only: bool) -> None:
    """Raise unless a model takes text alone, or is to be trained on text and keeps its other weights.

    Args:
        config: configuration of the model.
        text_only: the user wants to train it on text alone.

    Raises:
        ValueError: the model takes images, videos or sound, which would be ignored, or whose weights would be lost.
    """
    if not takes_media(config):
        return
    what = f"model_type = {config.model_type!r} also takes images, videos or sound"
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    built = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if None not in (whole, built) and whole != built:
        raise ValueError(
            f"{what}, whose weights {built} does not load: a saved checkpoint would lack them. Take a checkpoint of the language model alone"
        )
    if not text_only:
        raise ValueError(f"{what}, which an engine would ignore: set fsdp.text_only=True to train it on text alone")


def media_tokens(config: PretrainedConfig) -> frozenset[int]:
    """Return the token ids that stand for an image, a video or sound. Empty for a model of text."""
    values = (getattr(config, name, None) for name in _PLACEHOLDERS) if takes_media(config) else ()
    return frozenset(value for value in values if isinstance(value, int))
