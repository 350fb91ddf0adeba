"""Pictures in messages: what a model takes of them, and the tokens that stand for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.image_utils import load_image

from areal.chat.answer import Message
from areal.utils.data.images import GRID, PIXELS


class Expansion(NamedTuple):
    """What a model reads for a picture: ``text``, with ``tokens`` for its parts, where the chat template renders ``placeholder``."""

    placeholder: str
    text: str
    tokens: int


class Pictures:
    """Reads the pictures of messages, as models with images take them.

    A picture is a part ``{"type": "image", "image": ...}`` of a message's content: what the processor takes, or the path of a file. For
    images in grids of patches (Qwen2-VL and its successors), the chat template renders one token, which is repeated here for each part of
    the picture. Models whose images all have one size read a longer text instead: see :meth:`of_one_size`.

    Args:
        processor: image processor of transformers, such as ``AutoImageProcessor.from_pretrained(model)``.
        token: id of the token that stands for a part of an image, ``config.image_token_id``.
        expansion: what stands for a picture whose number of tokens does not depend on it.
    """

    def __init__(self, processor: Callable[..., Any], token: int, expansion: Expansion | None = None) -> None:
        self._processor, self._token, self._expansion = processor, token, expansion
        self._merge = int(getattr(processor, "merge_size", 1))
        self._keys = (GRID, PIXELS) if expansion is None else (PIXELS,)  # the first has an entry for each picture

    @classmethod
    def of_one_size(cls, processor: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, tokens: int) -> Pictures:
        """Return what reads pictures for Gemma 3.

        Args:
            processor: its image processor.
            tokenizer: its tokenizer, which names the tokens around an image.
            tokens: of an image, ``config.mm_tokens_per_image``.

        Raises:
            ValueError: the tokenizer does not name them.
        """
        names = ("boi_token", "image_token", "eoi_token")
        begin, part, end = (getattr(tokenizer, name, None) for name in names)
        if begin is None or part is None or end is None:
            raise ValueError(
                f"tokenizer = {tokenizer.name_or_path!r}: it has no {', '.join(names)}; pass that of the model"
            )
        expansion = Expansion(begin, f"\n\n{begin}{part * tokens}{end}\n\n", tokens)
        return cls(processor, tokenizer.get_vocab()[part], expansion)

    def expanded(self, text: str) -> str:
        """Return a rendered text with what the model reads for each picture."""
        return text if self._expansion is None else text.replace(self._expansion.placeholder, self._expansion.text)

    def inputs(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """Return ``pixel_values`` of all pictures, in order, with ``image_grid_thw`` for grids; nothing for messages without pictures.

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
        return {key: made[key] for key in self._keys}

    def repeats(self, ids: Sequence[int], inputs: dict[str, Tensor]) -> list[int]:
        """Return for each token of a rendered text how often it is repeated: once, or once for each part of its picture.

        Raises:
            ValueError: the text has another number of placeholders than there are pictures.
        """
        n_pictures = len(inputs[self._keys[0]]) if inputs else 0
        places = [k for k, token in enumerate(ids) if token == self._token]
        if len(places) != n_pictures * (1 if self._expansion is None else self._expansion.tokens):
            raise ValueError(
                f"the chat template renders {len(places)} tokens {self._token} for {n_pictures} pictures: give each picture as a part "
                '{"type": "image", "image": ...}, and no placeholder in a text'
            )
        if self._expansion is not None or not inputs:
            return [1] * len(ids)
        grids = inputs[GRID].tolist()
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
