"""Images of requests to ``/inference/v1/generate`` of vLLM.

Read and run against vLLM 0.32.0: ``entrypoints/scale_out/token_in_token_out/protocol.py`` and ``mm_serde.py`` (fields),
``v1/serial_utils.py`` (tensors in msgpack), ``model_executor/models/qwen2_vl.py`` (fields of an image of the Qwen families).
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from areal.inference.http.sent_images import SentImages
from areal.inference.http.servers.http_call import RequestBody
from areal.utils.data.images import GRID, PIXELS, Image

try:
    import msgpack
except ImportError:
    msgpack = None

_RAW = 3
"""Type of an extension of msgpack that has the bytes of a tensor."""


class VLLMPlace(RequestBody):
    """``features.mm_placeholders.image[]``: the tokens of an image."""

    offset: int = Field(ge=0)
    length: int = Field(gt=0)


class VLLMFeatures(RequestBody):
    """``features``: for each image a name, under which vLLM keeps what it has computed of it, its tokens, and what its processor makes."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[VLLMPlace]]
    kwargs_data: dict[str, list[str]]


def features_of(sent: SentImages) -> VLLMFeatures:
    """Return the images of a request.

    Raises:
        ValueError: msgpack is not installed.
    """
    if msgpack is None:
        raise ValueError("images for vLLM need msgpack: pip install 'areal[rollout]'")
    places = [
        VLLMPlace(offset=place, length=image.n_tokens) for place, image in zip(sent.places, sent.images, strict=True)
    ]
    return VLLMFeatures(
        mm_hashes={"image": [f"{image.digest().hex()}-{sent.version}" for image in sent.images]},
        mm_placeholders={"image": places},
        kwargs_data={"image": [_encoded(image) for image in sent.images]},
    )


def _encoded(image: Image) -> str:
    """Return an image as vLLM's processor would make it. ``flat`` and ``batched`` say how those of several requests are joined."""
    joined = {"keep_on_cpu": False, "slices": [[0, len(image.pixels), None]], "dim": 0}
    item = {
        PIXELS: {"data": _tensor(image.pixels), "field": ["flat", joined]},
        GRID: {"data": _tensor(torch.tensor(image.grid)), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return base64.b64encode(msgpack.packb(item)).decode("ascii")


def _tensor(x: Tensor) -> list[Any]:
    raw = x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return [str(x.dtype).removeprefix("torch."), list(x.shape), msgpack.ExtType(_RAW, raw)]
