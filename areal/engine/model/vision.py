"""The vision tower of a model: the features of images in the place of the tokens that stand for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from areal.api.microbatch import ImageInputs
from areal.api.parallel import ParallelDims
from areal.engine.attention.kernels import TakeRows
from areal.engine.model.media import IMAGE_FAMILIES

_PARTS = ("visual", "vision_tower", "multi_modal_projector")
VISION_LAYERS = rf".*\.({'|'.join(_PARTS)})\..*"
"""Names of the layers of :func:`vision_parts`, as a regular expression."""

_LAYERS = r"blocks|(.*\.)?encoder\.layers"
"""Names of the lists of layers in a vision tower, as a regular expression."""


@dataclass(frozen=True)
class LocalImages:
    """The images of a micro-batch, and the tokens of one rank that stand for them. Opaque to FSDP.

    Attributes:
        inputs: images, which every rank of a micro-batch encodes.
        rows: int64 ``[T]``. For each token of this rank its row among the tokens of all images; -1 for a token of text.
    """

    inputs: ImageInputs
    rows: Tensor


def attention_by_part(config: PretrainedConfig, text: str) -> str | dict[str, str]:
    """Return the attention to build a model with: ``text`` for its tokens, and that of torch for the patches of images."""
    return {"text_config": text, "vision_config": "sdpa"} if config.model_type in IMAGE_FAMILIES else text


def check_image_layout(dims: ParallelDims, *, packed: bool) -> None:
    """Raise if a model with images cannot be trained on a layout.

    Raises:
        ValueError: names the layout or the option.
    """
    if not packed:
        raise ValueError(
            "fsdp.attention = 'rows' with a model that takes images: its sequences are packed; choose 'auto'"
        )
    if dims.pp > 1:
        raise ValueError(f"{dims} with a model that takes images, which the engine cannot cut into stages: leave p out")


def vision_parts(hf: PreTrainedModel) -> list[Any]:
    """Return the modules that encode images, of a family whose images engines train on; none for other models."""
    known = hf.config.model_type in IMAGE_FAMILIES
    return [getattr(hf.model, name) for name in _PARTS if known and hasattr(hf.model, name)]


def vision_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the vision tower, which are gathered one at a time; none for a model without one."""
    lists = [x for tower in vision_parts(hf)[:1] for name, x in tower.named_modules() if re.fullmatch(_LAYERS, name)]
    return [layer for each in lists for layer in each]


def encode_images(hf: PreTrainedModel, images: ImageInputs, dtype: torch.dtype) -> list[Tensor]:
    """Return the features of images, each ``[N, H]`` in ``dtype``: of the last layer of the tower, and then of inner layers.

    Args:
        hf: the model.
        images: on its device.
        dtype: of the features, and of the pixels that the tower reads.
    """
    pixels, grids = images.pixel_values.to(dtype), images.grids
    if grids is None:
        encoded = hf.model.get_image_features(pixels)
    else:
        encoded = hf.model.visual(pixels, grid_thw=grids, **images.tower)
    inner = getattr(encoded, "deepstack_features", None) or ()
    return [each.to(dtype) for each in (encoded.pooler_output.flatten(0, -2), *inner)]


def decoder_inputs(
    hf: PreTrainedModel, ids: Tensor, images: LocalImages, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return arguments of a decoder: the embeddings of tokens, with the features of images where tokens stand for them.

    Args:
        hf: the model.
        ids: int64 ``[T]``. Tokens of this rank.
        images: images of the micro-batch.
        group: ranks that divide the embeddings of these tokens, in order; ``None`` for one rank.
    """
    embedded: Tensor = hf.get_input_embeddings()(ids[None])
    encoded, *deep = encode_images(hf, images.inputs, embedded.dtype)
    rows = images.rows if group is None else images.rows.chunk(group.size())[group.rank()]
    stands, rows = (rows >= 0)[:, None], rows.clamp(min=0)

    def of_tokens(features: Tensor, text: Tensor) -> Tensor:
        # Text takes the first row and leaves it out again, so that every rank has a gradient for its tower.
        return torch.where(stands, TakeRows.apply(features, rows), text)

    inputs: dict[str, Any] = {"inputs_embeds": of_tokens(encoded, embedded)}
    if deep:
        # Features of inner layers are added after the first layers of the decoder, in the row 0 of its states.
        zeros = torch.zeros_like(embedded)
        inputs["visual_pos_masks"] = torch.zeros(1, dtype=torch.int64, device=ids.device)
        inputs["deepstack_visual_embeds"] = [of_tokens(features, zeros) for features in deep]
    return inputs
