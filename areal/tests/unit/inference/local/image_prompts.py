"""Prompts with images, and the log-probs of their answers by transformers alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal.inference.local.sampler import log_probs
from areal.inference.protocol import Completion
from areal.tests.grid.vision_models import IMAGE_TOKEN, images, tokens
from areal.utils.data.image_prompt import ImagePrompt, Prompt, prompt_images, prompt_tokens

WIDE, SMALL, ONE = (1, 4, 8), (1, 4, 4), (1, 2, 2)


def rarely_drawing(made: PreTrainedModel) -> PreTrainedModel:
    """Return the model, which draws tokens of images rarely: their logits are 0, and others are large."""
    head = made.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(3.0)
        head[IMAGE_TOKEN:] = 0
    return made


def prompt(*parts: int | tuple[int, int, int], seed: int, pixels: int | None = None) -> ImagePrompt:
    """Return random text and images. ``pixels``: another seed for the images."""
    grids = [part for part in parts if not isinstance(part, int)]
    ids = tokens(*parts, seed=seed).tolist()
    return ImagePrompt(tuple(ids), images(*grids, seed=seed if pixels is None else pixels))


FIRST = prompt(5, WIDE, 4, SMALL, 3, seed=1)
PROMPTS: list[Prompt] = [
    FIRST,
    # The same tokens, with other images.
    prompt(5, WIDE, 4, SMALL, 3, seed=1, pixels=2),
    # The same beginning, and then another image.
    ImagePrompt(
        FIRST.tokens,
        {**FIRST.images, "pixel_values": FIRST.images["pixel_values"].clone().index_fill_(0, torch.tensor([40]), 1.0)},
    ),
    tokens(9, seed=3).tolist(),
    prompt(ONE, 2, (1, 12, 12), 30, seed=4),
    FIRST,
    prompt(2, SMALL, seed=5),
]


@torch.no_grad()
def whole_logprobs(made: PreTrainedModel, given: Prompt, answer: Completion) -> Tensor:
    """Return the log-probs of an answer by one forward of transformers."""
    ids = torch.tensor([[*prompt_tokens(given), *answer.tokens]])
    kwargs: dict[str, Any] = {key: x.float() if x.is_floating_point() else x for key, x in prompt_images(given).items()}
    if kwargs:
        kwargs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    made.set_attn_implementation("sdpa")
    logits = made(ids, use_cache=False, **kwargs).logits[0, -1 - len(answer.tokens) : -1]
    assert answer.sampling is not None
    chosen = torch.tensor(answer.tokens)[:, None]
    return log_probs(logits, [answer.sampling] * len(chosen)).gather(1, chosen).squeeze(1)
