"""Names of requests in transformers' manager, which carry what else belongs to a request."""

from __future__ import annotations

from areal.inference.local.prompt_images import PromptImages
from areal.inference.local.served_adapters import ServedAdapter


class RequestName(str):
    """Name of a request with its adapter and its images.

    The manager keeps the name for as long as it knows the request, which may be a forward longer than the rollout does.

    Attributes:
        adapter: the request's adapter; ``None`` for the model itself.
        images: images of its prompt; ``None`` without any.
    """

    adapter: ServedAdapter | None
    images: PromptImages | None

    def __new__(cls, name: str, adapter: ServedAdapter | None, images: PromptImages | None = None) -> RequestName:
        self = super().__new__(cls, name)
        self.adapter, self.images = adapter, images
        return self


def adapter_of(name: str) -> ServedAdapter | None:
    """Return the adapter of a request's name; ``None`` for the model itself."""
    return name.adapter if isinstance(name, RequestName) else None


def images_of(name: str) -> PromptImages | None:
    """Return the images of a request's name; ``None`` without any."""
    return name.images if isinstance(name, RequestName) else None
