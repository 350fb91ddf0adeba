"""Images that a request sends to a server."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from areal.utils.data.image_prompt import Prompt, prompt_images, prompt_tokens
from areal.utils.data.images import BatchImages, Image, PatchRules


@dataclass(frozen=True, eq=False)
class SentImages:
    """Images of a prompt, in the form that its model's image processor makes.

    Attributes:
        images: in order.
        places: place of the first token of each.
        version: of the weights that encode them. A server may keep what it has encoded, and other weights encode other features.
    """

    images: tuple[Image, ...]
    places: tuple[int, ...]
    version: int | None = None

    @classmethod
    def of(cls, prompt: Prompt, rules: PatchRules) -> SentImages | None:
        """Return the images of a prompt; ``None`` without any.

        Raises:
            ValueError: images and tokens do not match.
        """
        given, ids = prompt_images(prompt), torch.tensor(prompt_tokens(prompt))
        found = BatchImages.of([ids], {key: [value] for key, value in given.items()}, rules)
        if not found.distinct:
            return None
        begins = nn.functional.pad((ids == rules.token).int(), (1, 0)).diff() == 1
        images = rules.images(0, *(given[key] for key in ("pixel_values", "image_grid_thw")))
        return cls(tuple(images), tuple(begins.nonzero()[:, 0].tolist()))

    def under(self, version: int) -> SentImages:
        """Return the images for weights of a version."""
        return replace(self, version=version)
