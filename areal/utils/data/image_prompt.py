"""A prompt with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.utils.data.images import BatchImages, ImageRules


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images, as clients of rollouts take it in place of token ids.

    Attributes:
        tokens: token ids, with a run of the model's image token for each image.
        images: the images in order, as keys of a sample; see :data:`~areal.utils.data.images.IMAGE_KEYS`.
    """

    tokens: tuple[int, ...]
    images: Mapping[str, Tensor]


Prompt = Sequence[int] | ImagePrompt
"""A prompt of a model: token ids, or token ids with images."""


def prompt_tokens(prompt: Prompt) -> Sequence[int]:
    """Return the token ids of a prompt."""
    return prompt.tokens if isinstance(prompt, ImagePrompt) else prompt


def batch_of_prompt(prompt: Prompt, rules: ImageRules) -> BatchImages:
    """Return the images of a prompt, as a batch of one sample.

    Raises:
        ValueError: images and tokens do not match.
    """
    keys = {key: [value] for key, value in prompt_images(prompt).items()}
    return BatchImages.of([torch.tensor(prompt_tokens(prompt))], keys, rules)


def prompt_images(prompt: Prompt) -> dict[str, Tensor]:
    """Return the images of a prompt as keys of a sample; empty for token ids."""
    return dict(prompt.images) if isinstance(prompt, ImagePrompt) else {}
