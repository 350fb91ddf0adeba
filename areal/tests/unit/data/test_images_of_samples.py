"""Images of a batch: their positions, the tokens that stand for them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from areal.api import MicroBatchSpec
from areal.dispatch import rank_calls
from areal.engine.model.media import image_rules
from areal.tests.grid.reference import Sample
from areal.tests.grid.vision_models import (
    GRID_FAMILIES,
    GRIDS,
    IMAGE_TOKEN,
    PATCH,
    SIDE,
    SQUARE,
    VISION_FAMILIES,
    images,
    square_images,
    tokens,
)
from areal.utils.data import plan_batch
from areal.utils.data.images import BatchImages, ImageRules, PatchRules, SquareRules

A, B, C, D = GRIDS
RULES = PatchRules(IMAGE_TOKEN, 2, PATCH)
SQUARES = SquareRules(IMAGE_TOKEN, 4, (3, SIDE, SIDE))


def sample(*parts: Any, seed: int = 0, **changes: Tensor) -> Sample:
    grids = [part for part in parts if isinstance(part, tuple)]
    made = {"input_ids": tokens(*parts, seed=seed), **(images(*grids, seed=seed) if grids else {})}
    return {**made, **changes}


def square_sample(*parts: Any, seed: int = 0, **changes: Any) -> Sample:
    """Return a sample of Gemma 3, whose images are ``SQUARE`` among the parts."""
    number = sum(part == SQUARE for part in parts)
    made = {"input_ids": tokens(*parts, seed=seed), **(square_images(number, seed=seed) if number else {}), **changes}
    return {key: x for key, x in made.items() if x is not None}


def batch_images(*samples: Sample, rules: ImageRules = RULES) -> BatchImages:
    columns = {key: [sample.get(key) for sample in samples] for key in ("pixel_values", "image_grid_thw")}
    return BatchImages.of([sample["input_ids"] for sample in samples], columns, rules)


@pytest.mark.parametrize("family", sorted(GRID_FAMILIES))
@pytest.mark.parametrize("parts", [(3, A, 5), (B, 4, C), (2, D, 1, A, 1, C)], ids=str)
def test_positions_are_those_of_transformers(family: str, parts: tuple[Any, ...]) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(GRID_FAMILIES[family]())
    one = sample(*parts)
    kinds = (one["input_ids"] == IMAGE_TOKEN).long()[None]
    expected, _ = model.model.get_rope_index(one["input_ids"][None], kinds, image_grid_thw=one["image_grid_thw"])
    assert torch.equal(batch_images(one).positions[0], expected[:, 0].T)
    assert image_rules(model.config, text_only=False) == RULES


def test_equal_images_are_one_and_different_ones_are_not() -> None:
    first, again, other, text = sample(3, A, 1, B, 5), sample(1, A, seed=1), sample(3, A, seed=2), sample(4)
    again["pixel_values"] = first["pixel_values"][:32].clone()
    made = batch_images(first, again, other, text)
    assert [image.grid for image in made.distinct] == [A, B, A]
    # The tokens of an image have the rows of its first copy.
    assert made.rows[1].tolist() == [-1, *range(8)]
    assert made.rows[2].tolist() == [-1, -1, -1, *range(12, 20)]
    assert [made.n_tokens(i) for i in range(4)] == [12, 8, 8, 0]


def test_a_micro_batch_has_its_own_images_in_the_order_of_its_rows() -> None:
    samples = [sample(3, A, 1, seed=1), sample(2, C, 2, B, seed=2), sample(5), sample(A, 2, seed=1)]
    made = batch_images(*samples)
    own = made.of_samples((3, 1))
    # Sample 3 has the image of sample 0.
    assert own.grids.tolist() == [list(A), list(C), list(B)]
    pixels = own.pixel_values.split([32, 48, 16])
    assert torch.equal(pixels[0], samples[0]["pixel_values"])
    assert torch.equal(torch.cat(pixels[1:]), samples[1]["pixel_values"])
    assert own.rows.tolist() == [*range(8), -1, -1, -1, -1, *range(8, 20), -1, -1, *range(20, 24)]
    # Without images there is a black one, for which no token stands.
    none = made.of_samples((2,))
    assert none.grids.tolist() == [[1, 2, 2]]
    assert not none.pixel_values.any()
    assert none.rows.tolist() == [-1] * 5
    assert made.of_samples(()).rows.tolist() == [-1]


def test_the_border_of_a_shared_prefix_cuts_no_image() -> None:
    """Two prompts with the same tokens share those before their images, which differ in the last pixel."""
    one, two = sample(4, A, 3, seed=1), sample(4, A, 3, seed=1)
    two["pixel_values"] = one["pixel_values"].clone()
    two["pixel_values"][-1, -1] += 1
    plans = [plan_batch([one, other], MicroBatchSpec(share_prefixes=True), images=RULES) for other in (two, dict(one))]
    trees = [plan.trees[0] for plan in plans]
    assert [None if tree is None else tree.lengths for tree in trees] == [(15, 11), (15,)]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few images": (
        {"image_grid_thw": torch.tensor([A]), "pixel_values": torch.zeros(32, PATCH)},
        r"sample 1 has runs of \[8, 4\].*images of \[8\] tokens",
    ),
    "no images": ({"image_grid_thw": None, "pixel_values": None}, r"sample 1 has runs of \[8, 4\]"),
    "wrong order": ({"image_grid_thw": torch.tensor([B, A])}, r"runs of \[8, 4\].*images of \[4, 8\]"),
    "no grid": ({"image_grid_thw": None}, "sample 1 has no 'image_grid_thw'"),
    "odd grid": ({"image_grid_thw": torch.tensor([[1, 3, 8], [1, 4, 4]])}, "multiples of 2"),
    "a video": ({"image_grid_thw": torch.tensor([[2, 4, 4], [1, 4, 4]])}, r"has \[2, 4, 4\]: an image"),
    "flat grid": ({"image_grid_thw": torch.tensor(A)}, "pass integers"),
    "missing patches": ({"pixel_values": torch.zeros(47, PATCH)}, r"\[47, 96\].*needs.*\[48, 96\]"),
    "wide patches": ({"pixel_values": torch.zeros(48, PATCH + 1)}, r"\[48, 97\].*needs.*\[48, 96\]"),
    "bytes": ({"pixel_values": torch.zeros(48, PATCH, dtype=torch.uint8)}, "floating-point"),
    "a list": ({"pixel_values": [[0.0]]}, "'pixel_values' of sample 1 is a list"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_images_that_do_not_match_are_refused(changes: dict[str, Any], message: str) -> None:
    good = sample(2, A)
    bad = {key: x for key, x in {**sample(3, A, 1, B), **changes}.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        plan_batch([good, bad], MicroBatchSpec(), images=RULES)


def test_a_padded_batch_takes_a_list_of_images() -> None:
    rows = [sample(3, A, 1, seed=1), sample(2, seed=2)]
    ids, mask = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])], mask[i, : len(row["input_ids"])] = row["input_ids"], 1
    batch = {"input_ids": ids, "attention_mask": mask}
    keys = {key: [rows[0][key], None] for key in ("pixel_values", "image_grid_thw")}
    plan = plan_batch({**batch, **keys}, MicroBatchSpec(), images=RULES)
    assert plan.images is not None
    assert [len(row) for row in plan.images.rows] == [12, 2]
    with pytest.raises(ValueError, match="'pixel_values' is not a list of 2 tensors"):
        plan_batch({**batch, **keys, "pixel_values": torch.zeros(2, 4)}, MicroBatchSpec(), images=RULES)
    with pytest.raises(ValueError, match=r"'pixel_values' is in a batch.*text alone"):
        plan_batch({**batch, **keys}, MicroBatchSpec())


def test_images_of_one_size() -> None:
    assert image_rules(VISION_FAMILIES["gemma3"](), text_only=False) == SQUARES
    first = square_sample(3, SQUARE, 1, SQUARE, seed=1)
    again = square_sample(SQUARE, 2, pixel_values=first["pixel_values"][1:].clone())
    text = square_sample(3, seed=2)
    made = batch_images(first, again, text, rules=SQUARES)
    assert len(made.distinct) == 2
    assert made.rows[0].tolist() == [-1, -1, -1, 0, 1, 2, 3, -1, 4, 5, 6, 7]
    assert made.rows[1].tolist() == [4, 5, 6, 7, -1, -1]
    # Sample 1 has the second image of sample 0.
    own = made.of_samples((2, 1))
    assert torch.equal(own.pixel_values, first["pixel_values"][1:])
    assert own.rows.tolist() == [-1, -1, -1, 0, 1, 2, 3, -1, -1]
    assert own.bidirectional is not None
    assert own.bidirectional.tolist() == [False] * 3 + [True] * 4 + [False] * 2
    assert own.positions is own.grids is None
    none = made.of_samples(())
    assert none.pixel_values.shape == (1, 3, SIDE, SIDE)
    assert not none.pixel_values.any()
    assert batch_images(sample(A)).of_samples((0,)).bidirectional is None


def test_only_images_that_see_both_directions_reach_the_layout() -> None:
    def layout_inputs(one: Sample, rules: ImageRules) -> list[Any]:
        seen: list[Any] = []
        plan = plan_batch([one], MicroBatchSpec(), images=rules)
        plan.build(n_mbs=2, device=torch.device("cpu"), layout=lambda *args: seen.append(args[-1]))
        return seen

    expected = torch.tensor([False] * 2 + [True] * 4 + [False])
    of_mb, of_filler = layout_inputs(square_sample(2, SQUARE, 1), SQUARES)
    assert torch.equal(of_mb, expected)
    assert of_filler is None
    assert layout_inputs(sample(2, A, 1), RULES) == [None, None]


def test_a_driver_gets_no_images() -> None:
    plan = plan_batch([sample(2, A, 1)], MicroBatchSpec(), images=RULES)
    mbs = plan.build(n_mbs=1, device=torch.device("cpu"))
    assert mbs[0].images is not None
    assert rank_calls._without_tensors(mbs)[0].images is None


BAD_SQUARES: dict[str, tuple[dict[str, Any], str]] = {
    "too few images": ({"pixel_values": torch.zeros(1, 3, SIDE, SIDE)}, r"runs of \[4, 4\].*images of \[4\] tokens"),
    "no images": ({"pixel_values": None}, r"runs of \[4, 4\].*images of \[\] tokens"),
    "a part of an image": (
        {"input_ids": tokens(3, SQUARE, 1, SQUARE, seed=0)[:-1]},
        r"runs of \[4, 3\].*\[4, 4\] tokens",
    ),
    "no token between": ({"input_ids": tokens(3, SQUARE, SQUARE, seed=0)}, r"runs of \[8\].*another token between"),
    "another size": ({"pixel_values": torch.zeros(2, 3, SIDE, 14)}, r"\[2, 3, 28, 14\]: pass.*\[images, 3, 28, 28\]"),
    "one image": ({"pixel_values": torch.zeros(3, SIDE, SIDE)}, r"\[3, 28, 28\]: pass.*\[images, 3, 28, 28\]"),
    "bytes": ({"pixel_values": torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)}, "uint8.*floating-point"),
    "a grid": ({"image_grid_thw": torch.tensor([SQUARE, SQUARE])}, "sample 1 has 'image_grid_thw', but.*one size"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_SQUARES.values(), ids=BAD_SQUARES)
def test_images_of_one_size_that_do_not_match_are_refused(changes: dict[str, Any], message: str) -> None:
    bad = square_sample(3, SQUARE, 1, SQUARE, **changes)
    with pytest.raises(ValueError, match=message):
        plan_batch([square_sample(2, SQUARE), bad], MicroBatchSpec(), images=SQUARES)


def test_an_image_token_without_a_logit_is_refused() -> None:
    with pytest.raises(ValueError, match="image_token_id = 112 is outside the vocabulary of 112"):
        image_rules(VISION_FAMILIES["gemma3"](image_token_index=112), text_only=False)
