"""The output head in chunks of rows: the collectives of its weight, and its numbers."""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("jax")

from areal.engine.jax.model import token_outputs
from areal.tests.dist.jax.compiled import compiled
from areal.tests.grid.agreement import assert_verbs_agree
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.models import VOCAB
from areal.tests.harness.tiny import chosen, layout, started
from areal.tests.harness.world import record, world

IN_CHUNKS = {"kept_logits_mb": 0}
ROWS = 8
"""Rows of a chunk here: a micro-batch has 32 or more."""


@pytest.mark.parametrize("backend", chosen("jax:d2", "jax:c2"))
def test_head_in_chunks_is_gathered_and_reduced_once(backend: str) -> None:
    with mock.patch.object(token_outputs, "_CHUNK", ROWS), started(backend, **IN_CHUNKS) as engine:
        found, _ = compiled(engine)
        (head,) = [tuple(x.shape) for name, x in engine.named_tensors() if name == "lm_head.weight"]
    elements = head[0] * head[1]
    # Embedding and head have this shape, and no other array has as many rows as the vocabulary.
    traffic = {
        name: sum(each.elements(world().size) for each in programs if each.shape[-2:-1] == (VOCAB,))
        for name, programs in found.items()
    }
    record("elements of the head in collectives", backend, of_the_head=elements, **traffic)
    # A lookup gathers the embedding once.
    assert traffic["_evaluate"] <= 2 * elements
    assert traffic["_forward"] + traffic["_pull"] <= (3 + 1) * elements
    in_loops = [each for programs in found.values() for each in programs if VOCAB in each.shape and each.times > 1]
    assert not in_loops, in_loops


CELLS = {
    "jax:d2": ("qwen3", "terms", "lora"),
    "jax:c2": ("qwen3_tied", "terms", "plain"),
    "jax:t2": ("qwen3", "distill", "plain"),
}


@pytest.mark.parametrize(
    ("backend", "family", "objective", "options"), [layout(backend, *rest) for backend, rest in CELLS.items()]
)
def test_head_in_chunks_agrees_with_the_reference(backend: str, family: str, objective: str, options: str) -> None:
    cell = Cell(Layout(backend, "chunks", IN_CHUNKS), family, objective, "ragged", "tokens64", options)
    with mock.patch.object(token_outputs, "_CHUNK", ROWS):
        assert_verbs_agree(cell)
