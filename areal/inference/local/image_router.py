"""Application of images in a forward, each to the tokens of its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import FutureRequestState

from areal.inference.local.prompt_images import PromptImages
from areal.inference.local.request_name import images_of


@dataclass(frozen=True)
class _Span:
    """Tokens of one request in a forward: from row ``begin`` on, tokens ``start`` to ``stop`` of the request."""

    begin: int
    start: int
    stop: int
    images: PromptImages


class ImageRouter:
    """Gives the decoder the features and positions of requests with images. Calls are made between two forwards.

    The decoder has a hook from the first request with images on.

    Args:
        model: model whose forwards are changed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._spans: list[_Span] = []
        self._hooked = False

    def schedule(self, requests: Sequence[FutureRequestState]) -> None:
        """Set the images of the next forward, from its requests in the order of their tokens."""
        self._spans, begin = [], 0
        for request in requests:
            its = images_of(request.state.request_id)
            # The manager has counted the tokens of this forward.
            stop, count = request.state.position_offset, request.query_length
            if its is not None:
                self._spans.append(_Span(begin, stop - count, stop, its))
            begin += count
        if self._spans and not self._hooked:
            self._model.get_decoder().register_forward_pre_hook(self._change, with_kwargs=True)
            self._hooked = True

    def _change(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Replace arguments of a forward of the decoder, the next one after :meth:`schedule`."""
        spans, self._spans = self._spans, []
        if not spans:
            return None
        embedded: Tensor = kwargs["inputs_embeds"].clone()
        positions: Tensor = kwargs["position_ids"].expand(3, 1, -1).clone()
        deep: list[Tensor] = []
        for span in spans:
            own = slice(span.begin, span.begin + span.stop - span.start)
            positions[:, 0, own] = span.images.positions_between(span.start, span.stop).to(positions)
            rows = span.images.rows_between(span.start, span.stop)
            at = (rows >= 0).nonzero()[:, 0]
            if not len(at):
                continue
            into, taken = (span.begin + at).to(embedded.device), rows[at].to(embedded.device)
            first, *inner = span.images.encoded.features(self._model)
            embedded[0, into] = first[taken]
            deep = deep or [torch.zeros_like(embedded) for _ in inner]
            for layer, features in zip(deep, inner, strict=True):
                layer[0, into] = features[taken]
        changed = {**kwargs, "inputs_embeds": embedded, "position_ids": positions}
        if deep:
            # The decoder adds these to the row 0 of its states, after its first layers.
            changed["visual_pos_masks"] = torch.zeros(1, dtype=torch.int64, device=embedded.device)
            changed["deepstack_visual_embeds"] = deep
        return args, changed
