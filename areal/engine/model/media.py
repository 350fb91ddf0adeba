"""Models that take images, videos or sound besides text: engines train them with images, on text alone, or refuse them."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from areal.utils.data.images import ImageRules, PatchRules, SquareRules

try:
    from transformers import vision_utils
except ImportError:
    vision_utils = None  # type: ignore[assignment]

IMAGE_FAMILIES = frozenset({"gemma3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"})
"""Model types whose images engines train on."""

_TOWERS = ("vision_config", "audio_config")
_PLACEHOLDERS = tuple(f"{medium}_token_{form}" for medium in ("image", "video", "audio") for form in ("id", "index"))


def takes_media(config: PretrainedConfig) -> bool:
    """Return whether a model takes images, videos or sound."""
    towers = any(getattr(config, tower, None) is not None for tower in _TOWERS)
    return towers or config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def check_media(config: PretrainedConfig, *, text_only: bool, freeze_vision: bool = False) -> None:
    """Raise unless a model takes what an engine trains on, or is to be trained on text and keeps its other weights.

    Args:
        config: configuration of the model.
        text_only: the user wants to train it on text alone.
        freeze_vision: the user wants to train nothing of its vision tower.

    Raises:
        ValueError: the model takes images, videos or sound, which would be ignored, or whose weights would be lost; or an option has no
            effect.
    """
    if freeze_vision and (text_only or config.model_type not in IMAGE_FAMILIES):
        raise ValueError(
            f"fsdp.freeze_vision = True, but the engine trains model_type = {config.model_type!r} on text alone: leave it out"
        )
    if not takes_media(config) or config.model_type in IMAGE_FAMILIES:
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


def media_tokens(config: PretrainedConfig, images: ImageRules | None) -> frozenset[int]:
    """Return the token ids that stand for an image, a video or sound that an engine does not take. Empty for a model of text.

    Args:
        config: configuration of the model.
        images: images that the engine takes.
    """
    values = (getattr(config, name, None) for name in _PLACEHOLDERS) if takes_media(config) else ()
    known = () if images is None else (images.token,)
    return frozenset(value for value in values if isinstance(value, int)).difference(known)


def image_rules(config: PretrainedConfig, *, text_only: bool) -> ImageRules | None:
    """Return the images that an engine takes for a model; ``None`` if it trains on text alone.

    Raises:
        ValueError: transformers is too old; or the token that stands for images has no logit, although it is the target of the token
            before an image.
    """
    if text_only or config.model_type not in IMAGE_FAMILIES:
        return None
    if vision_utils is None:
        raise ValueError(
            f"model_type = {config.model_type!r} with images: this release of transformers is without transformers.vision_utils; install a "
            "newer one, or set fsdp.text_only=True"
        )
    size = config.get_text_config().vocab_size
    if config.image_token_id >= size:
        raise ValueError(
            f"image_token_id = {config.image_token_id} is outside the vocabulary of {size}: take a checkpoint with an embedding for it"
        )
    vision = config.vision_config
    if config.model_type == "gemma3":
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        return SquareRules(config.image_token_id, config.mm_tokens_per_image, shape)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return PatchRules(config.image_token_id, vision.spatial_merge_size, width, functools.partial(_tower_index, vision))


def _tower_index(vision: PretrainedConfig, grids: Tensor) -> dict[str, Tensor]:
    """Return what a tower would compute from grids on its device, where the host would wait for their values.

    Args:
        vision: configuration of the tower.
        grids: int64 ``[n, 3]``.
    """
    merge = vision.spatial_merge_size
    made = {
        "position_ids": vision_utils.get_vision_position_ids(grids, merge),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
    }
    if hasattr(vision, "window_size"):
        windows = vision_utils.get_vision_window_index(grids, merge, vision.window_size, vision.patch_size)
        made["window_index"], made["cu_window_seqlens"] = windows
    if hasattr(vision, "num_position_embeddings"):
        side = math.isqrt(vision.num_position_embeddings)
        made["interp_indices"], made["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, side, mode="bilinear", align_corners=True, spatial_merge_size=merge
        )
    return made


def model_factory(config: PretrainedConfig) -> Any:
    """Return the factory of transformers whose models have all weights of a checkpoint."""
    return AutoModelForImageTextToText if config.model_type in IMAGE_FAMILIES else AutoModelForCausalLM
