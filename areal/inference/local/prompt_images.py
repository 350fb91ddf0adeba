"""Images of prompts: their checks, their features, and the positions of their tokens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.api.microbatch import ImageInputs
from areal.engine.model.media import IMAGE_FAMILIES, image_rules
from areal.engine.model.vision import encode_images
from areal.utils.data.image_prompt import Prompt, batch_of_prompt, prompt_images, prompt_tokens
from areal.utils.data.images import ImageRules
from areal.utils.seeding import mixed

_WORD = 2**31
"""Tokens are hashed as int32."""


class EncodedImages:
    """The distinct images of a prompt, shared by the requests that have them.

    Args:
        inputs: the images, on the host.
    """

    def __init__(self, inputs: ImageInputs) -> None:
        self._inputs = inputs
        self._features: list[Tensor] | None = None

    def features(self, model: PreTrainedModel) -> list[Tensor]:
        """Return the features of all images, each ``[N, H]``: for embeddings, and then for the first layers if the family has some.

        They are computed by the first call, and by the first after :meth:`forget`.
        """
        if self._features is None:
            with _plain_vision(model):
                self._features = encode_images(model, self._inputs.map(lambda x: x.to(model.device)), model.dtype)
        return self._features

    def forget(self) -> None:
        """Drop the features, because other weights compute others."""
        self._features = None


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of a prompt.

    Attributes:
        encoded: the images.
        rows: int64 ``[S]``, on the host. For each token of the prompt its row among the features; -1 for text.
        positions: int64 ``[S, 3]``, on the host. Positions in time, height and width.
        words: for each token of an image, in order, bits of a hash of the image: equal images have equal words.
    """

    encoded: EncodedImages
    rows: Tensor
    positions: Tensor
    words: np.ndarray

    def rows_between(self, start: int, stop: int) -> Tensor:
        """Return :attr:`rows` for tokens of the prompt and of an answer that follows it."""
        rows = self.rows[start:stop]
        return nn.functional.pad(rows, (0, stop - start - len(rows)), value=-1)

    def positions_between(self, start: int, stop: int) -> Tensor:
        """Return positions ``[3, n]`` for tokens of the prompt and of an answer, which counts on from the largest."""
        length, last = len(self.positions), int(self.positions.max())
        begin = max(start, length)
        answer = last + 1 + torch.arange(begin - length, max(stop, begin) - length)
        return torch.cat([self.positions[start:stop], answer[:, None].expand(-1, 3)]).T

    def hashed(self, tokens: list[int], adapter: int, vocab: int) -> list[int]:
        """Return tokens to hash in place of those of a request: equal ones mean equal images, computed with an equal adapter.

        An image with one token has 31 bits, and one with four or more 124.

        Args:
            tokens: of the prompt, and of an answer.
            adapter: number of the adapter.
            vocab: number of token ids.
        """
        hashed = np.asarray(tokens, np.int64)
        stands = (self.rows >= 0).numpy()[: len(hashed)]
        words = self.words[: stands.sum()] ^ (mixed(adapter) % _WORD)
        hashed[: len(stands)][stands] = vocab + words % (_WORD - vocab)
        return hashed.tolist()


class ImageReader:
    """Checks the images of prompts. Equal images of prompts in progress are encoded once. Threads may share a reader.

    Args:
        model: model that generates.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config
        self._token = getattr(model.config, "image_token_id", None)
        self._known: weakref.WeakValueDictionary[bytes, EncodedImages] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # of the dictionary, whose loops and insertions are Python code

    def read(self, prompt: Prompt) -> PromptImages | None:
        """Return the images of a prompt; ``None`` without any.

        Raises:
            ValueError: the model takes no images, or replicas cannot compute them; images and tokens do not match.
        """
        if not prompt_images(prompt) and (self._token is None or self._token not in prompt_tokens(prompt)):
            return None
        found = batch_of_prompt(prompt, self._rules())
        rows, positions = found.rows[0], found.positions[0]
        if positions is None:
            raise ValueError(f"model_type = {self._config.model_type!r}: a replica cannot compute its images")
        digests = [image.digest() for image in found.distinct]
        words = np.frombuffer(b"".join(digests), np.uint32).astype(np.int64).reshape(len(digests), -1) % _WORD
        of_tokens = [np.resize(words[k], image.n_tokens) for k, image in enumerate(found.distinct)]
        made = EncodedImages(found.of_samples([0]))
        with self._lock:
            encoded = self._known.setdefault(b"".join(digests), made)
        return PromptImages(encoded, rows, positions, np.concatenate(of_tokens)[rows[rows >= 0].numpy()])

    def forget(self) -> None:
        """Drop all features, because other weights compute others."""
        with self._lock:
            known = list(self._known.values())
        for each in known:
            each.forget()

    def _rules(self) -> ImageRules:
        """Return the images that the model takes.

        Raises:
            ValueError: it takes none, or a replica cannot compute them.
        """
        rules = image_rules(self._config, text_only=False)
        if rules is None:
            families = ", ".join(sorted(IMAGE_FAMILIES))
            raise ValueError(
                f"the prompt has images, and model_type = {self._config.model_type!r} takes none: choose one of {families}"
            )
        if rules.bidirectional:
            raise ValueError(
                f"the prompt has images, and the tokens of an image of model_type = {self._config.model_type!r} see each other in both "
                "directions, which continuous batching does not compute: leave images out, or choose another family"
            )
        return rules


@contextmanager
def _plain_vision(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the vision tower attends without the paged cache, which continuous batching sets for all parts of a model."""
    vision = model.config.vision_config
    paged = vision._attn_implementation
    vision._attn_implementation = paged.removeprefix("paged|")
    try:
        yield
    finally:
        vision._attn_implementation = paged
