"""Pictures in messages: what a model takes of them, and the tokens that stand for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.image_utils import load_image

from areal.chat.answer import Message
from areal.utils.data.images import GRID, PIXELS


class Pictures:
    """Reads the pictures of messages, as models with images in grids of patches take them (Qwen2-VL and its successors).

    A picture is a part ``{"type": "image", "image": ...}`` of a message's content: what the processor takes, or the path of a file. The
    chat template renders one token for it, which is repeated here for each part of the picture.

    Args:
        processor: image processor of transformers, such as ``AutoImageProcessor.from_pretrained(model)``.
        token: id of the token that stands for a part of an image, ``config.image_token_id``.
    """

    def __init__(self, processor: Callable[..., Any], token: int) -> None:
        self._processor, self._token = processor, token
        self._merge = int(getattr(processor, "merge_size", 1))

    def inputs(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """Return ``pixel_values`` and ``image_grid_thw`` of all pictures, in order; nothing for messages without pictures.

        Raises:
            ValueError: a file cannot be read, or the processor refuses a picture.
        """
        pictures = [_read(picture) for picture in pictures_of(messages)]
        if not pictures:
            return {}
        try:
            made = self._processor(images=pictures, return_tensors="pt")
        except (TypeError, ValueError) as error:
            raise ValueError(f"the image processor refuses a picture of the messages: {error}") from error
        return {PIXELS: made[PIXELS], GRID: made[GRID]}

    def repeats(self, ids: Sequence[int], inputs: dict[str, Tensor]) -> list[int]:
        """Return for each token of a rendered text how often it is repeated: once, or once for each part of its picture.

        Raises:
            ValueError: the text has another number of placeholders than there are pictures.
        """
        grids = inputs[GRID].tolist() if inputs else []
        places = [k for k, token in enumerate(ids) if token == self._token]
        if len(places) != len(grids):
            raise ValueError(
                f"the chat template renders {len(places)} tokens {self._token} for {len(grids)} pictures: give each picture as a part "
                '{"type": "image", "image": ...}, and no placeholder in a text'
            )
        counts = dict(zip(places, (math.prod(grid) // self._merge**2 for grid in grids), strict=True))
        return [counts.get(k, 1) for k in range(len(ids))]


def _read(picture: Any) -> Any:
    if not isinstance(picture, str | Path):
        return picture
    try:
        return load_image(str(picture))
    except (OSError, ValueError) as error:
        raise ValueError(f"image = {str(picture)!r}: no picture can be read there: {error}") from error


def pictures_of(messages: Sequence[Message]) -> list[Any]:
    """Return the pictures of messages, in order.

    Raises:
        ValueError: a part has a picture in another form.
    """
    pictures = []
    for i, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type", "text") == "text":
                continue
            if part["type"] != "image" or "image" not in part:
                raise ValueError(
                    f'messages[{i}] has a part of the type {part["type"]!r}: give a picture as {{"type": "image", "image": ...}}'
                )
            pictures.append(part["image"])
    return pictures
