"""Bugs of prompts with images in rollouts: answers to other images, or to images in other places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from areal.tests.mutants.planting import Function, mutant
from areal.utils.data.image_prompt import prompt_tokens

LOCAL = "unit/inference/local/test_image_prompts.py::{}"
ANSWERS = LOCAL.format("test_answers_see_the_images_of_their_prompt[{}]")


@mutant("areal.inference.local.shared_prompts:images_of", ANSWERS.format("qwen2_5_vl"))
def prefix_shared_across_images(right: Function) -> Function:
    """A prompt computed with one image is used by a request with another image of the same size."""
    return lambda name: None


@mutant("areal.inference.local.prompt_images:PromptImages.rows_between", ANSWERS.format("split-prompts"))
def image_begins_anew_in_each_forward(right: Function) -> Function:
    """The second part of a long prompt gets the first rows of its images."""
    return lambda self, start, stop: right(self, 0, stop - start)


@mutant("areal.inference.local.prompt_images:PromptImages.positions_between", ANSWERS.format("qwen3_vl"))
def answer_counts_on_from_the_number_of_tokens(right: Function) -> Function:
    """The tokens of an answer have the positions that they would have behind text."""

    def wrong(self: Any, start: int, stop: int) -> Any:
        positions, length = right(self, start, stop).clone(), len(self.positions)
        places = torch.arange(start, stop)
        positions[:, places >= length] = places[places >= length]
        return positions

    return wrong


@mutant(
    "areal.inference.local.prompt_images:EncodedImages.forget",
    LOCAL.format("test_images_are_encoded_by_the_weights_of_an_update"),
)
def features_of_older_weights(right: Function) -> Function:
    """Features of images stay after an update of the tower."""
    return lambda self: None


@mutant("areal.chat.chat:Chat.rollout_prompt", "unit/chat/test_pictures.py::test_episodes_send_and_keep_pictures")
def pictures_are_not_sent(right: Function) -> Function:
    """Clients get the tokens of pictures alone."""
    return lambda self, messages: list(prompt_tokens(right(self, messages)))


@mutant(
    "areal.inference.http.sent_images:SentImages.under",
    "unit/inference/http/test_sent_images.py::test_names_of_images_differ_by_pixels_and_weights",
)
def images_named_for_all_weights(right: Function) -> Function:
    """A server keeps what older weights have encoded."""
    return lambda self, version: self


@mutant(
    "areal.inference.http.model_check:ModelCheck.images",
    "unit/inference/http/test_sent_images.py::test_request_has_each_image_with_its_tokens",
)
def images_sent_in_the_wrong_order(right: Function) -> Function:
    """The images of a prompt are sent in the reverse order."""

    def wrong(self: Any, prompt: Any) -> Any:
        made = right(self, prompt)
        return None if made is None else replace(made, images=made.images[::-1])

    return wrong
