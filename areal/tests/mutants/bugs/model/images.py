"""Bugs of images that the suite must catch: images of other tokens, other positions, and towers that are not run or not trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from areal.engine.fsdp.parallelize import transformer_layers
from areal.engine.model.vision import vision_layers
from areal.tests.mutants.planting import Function, mutant

LAYOUT = "dist/parallel/test_images.py::test_layouts_compute_the_same[{}]"
UNIT = "unit/data/test_images_of_samples.py::{}"


@mutant("areal.utils.data.images:BatchImages.of_samples", LAYOUT.format("qwen2_5_vl-d1"))
def images_in_the_wrong_order(right: Function) -> Function:
    """The patches of a micro-batch's images are in the reverse order of their grids' tokens."""

    def wrong(self: Any, members: Any) -> Any:
        made = right(self, members)
        return replace(made, pixel_values=made.pixel_values.flip(0))

    return wrong


@mutant("areal.utils.data.images:BatchImages.of_samples", LAYOUT.format("qwen2_5_vl-d1"))
def positions_of_the_packed_row(right: Function) -> Function:
    """Positions go on from one sequence to the next, and images have none of their own."""

    def wrong(self: Any, members: Any) -> Any:
        made = right(self, members)
        return replace(made, positions=torch.arange(len(made.rows))[:, None].expand(-1, 3))

    return wrong


@mutant(
    "areal.utils.data.images:Image.digest",
    UNIT.format("test_equal_images_are_one_and_different_ones_are_not"),
    LAYOUT.format("qwen2_5_vl-d1-shared"),
)
def images_of_one_size_are_equal(right: Function) -> Function:
    """Images are compared by their sizes: one prompt gets the image of another."""
    return lambda self: repr(self.grid).encode().ljust(16)[:16]


@mutant(
    "areal.utils.data.images:BatchImages.prefix_keys", UNIT.format("test_the_border_of_a_shared_prefix_cuts_no_image")
)
def prefixes_of_tokens_alone(right: Function) -> Function:
    """Prompts with the same tokens share their prefix, whatever their images are."""
    return lambda self: [torch.zeros_like(row) for row in self.rows]


@mutant("areal.engine.model.vision:vision_parts", LAYOUT.format("qwen2_5_vl-d1-frozen"))
def tower_is_trained_although_frozen(right: Function) -> Function:
    """The option that freezes the tower freezes nothing."""

    def wrong(hf: Any) -> Any:
        parts = right(hf)
        for part in parts:
            part.requires_grad_ = lambda trained: None
        return parts

    return wrong


@mutant(
    "areal.chat.pictures:Pictures.expanded", "unit/chat/test_pictures.py::test_pictures_of_one_size_are_those_of_gemma"
)
def image_without_its_surroundings(right: Function) -> Function:
    """The parts of an image of Gemma stand without the empty lines around them."""

    def wrong(self: Any, text: str) -> str:
        expanded: str = right(self, text)
        return expanded.replace("\n\n<start_of_image>", "<start_of_image>")

    return wrong


@mutant(
    "areal.engine.fsdp.parallelize:parallelize",
    "dist/parallel/test_expert_parallel.py::test_a_forward_of_images_gathers_each_layer_once[*]",
)
def tower_gathered_after_the_decoder(right: Function) -> Function:
    """The last layer of the decoder gathers the tower ahead, which no longer runs."""

    def wrong(model: Any, *args: Any) -> None:
        right(model, *args)
        last: Any = transformer_layers(model)[-1]
        last.set_modules_to_forward_prefetch(vision_layers(model.hf)[:1])

    return wrong


@mutant(
    "areal.utils.dtensor:reshard",
    "dist/parallel/test_images.py::test_weights_gathered_ahead_do_not_outlive_a_call[*]",
)
def weights_gathered_ahead_are_kept(right: Function) -> Function:
    """Weights that were gathered ahead and not used are those of the next forward."""

    def wrong(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    return wrong
