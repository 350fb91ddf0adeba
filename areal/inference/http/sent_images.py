"""Images that a request sends to a server."""

from __future__ import annotations

from dataclasses import dataclass, replace

from areal.utils.data.image_prompt import Prompt, batch_of_prompt
from areal.utils.data.images import Image, PatchRules


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
        placed = batch_of_prompt(prompt, rules).placed(0)
        return cls(tuple(image for _, image in placed), tuple(place for place, _ in placed)) if placed else None

    def under(self, version: int) -> SentImages:
        """Return the images for weights of a version."""
        return replace(self, version=version)
