"""Bugs of images whose tokens see each other in both directions."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

LAYOUT = "dist/parallel/test_images.py::test_layouts_compute_the_same[{}]"
UNIT = "unit/attention/test_bidirectional.py::{}"
EXACT = UNIT.format("test_images_see_themselves_in_both_directions[{}]")


@mutant(
    "areal.engine.attention.token_stream:_images",
    EXACT.format("fused-None-packed"),
    UNIT.format("test_images_of_two_sequences_are_two"),
)
def images_of_two_sequences_are_one(right: Function) -> Function:
    """An image at the end of a sequence and one at the beginning of the next are one, whose tokens see each other."""
    return lambda lengths, marked: right((sum(lengths),), marked)


@mutant(
    "areal.engine.attention.token_stream:TokenStream.bidirectional",
    LAYOUT.format("gemma3-d1"),
    LAYOUT.format("gemma3-c2-gather_kv"),
    EXACT.format("fused-None-tree"),
)
def images_stay_causal(right: Function) -> Function:
    """The tokens of an image see earlier ones only."""
    return lambda self, *args: None


@mutant(
    "areal.engine.attention.kernels:_visible",
    LAYOUT.format("gemma3-d1"),
    EXACT.format("fused-3-packed"),
    EXACT.format("unfused-3-packed"),
)
def window_ignored_for_images(right: Function) -> Function:
    """The tokens of an image see all earlier ones, also in layers with a window."""

    def wrong(n_queries: int, n_keys: int, window: int | None, device: Any, causal: bool = True) -> Any:
        return right(n_queries, n_keys, window if causal else None, device, causal)

    return wrong


@mutant(
    "areal.engine.attention.gather_kv:zigzag_index",
    UNIT.format("test_images_are_cut_by_the_chunks_of_gathered_keys[2-None-packed]"),
    LAYOUT.format("gemma3-c2-gather_kv"),
)
def keys_of_images_in_stream_order(right: Function) -> Function:
    """Gathered keys, which are in the order of ranks, are read in the order of the stream."""
    return lambda positions, length, size: positions


@mutant("areal.utils.data.images:SquareRules.images", LAYOUT.format("gemma3-d1"))
def images_of_a_sample_in_reverse(right: Function) -> Function:
    """The images of a sample are in the reverse order of the tokens that stand for them."""
    return lambda self, i, pixels, grid: right(self, i, pixels, grid)[::-1]
