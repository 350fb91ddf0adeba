"""Inputs of the JAX engine: which tokens see which, compared with the definition, and the shapes of its programs."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api import IGNORE_INDEX, MicroBatchSpec
from areal.api.batch import OutputName
from areal.engine.jax.inputs import LocalStreams, Sizes, StreamInputs, bucket, row_bucket, walk
from areal.engine.jax.model.attention import BLOCK
from areal.utils.data import plan_batch

SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)
"""Few token ids, so that many samples share a prefix."""


def visible(made: dict[str, np.ndarray], length: int) -> np.ndarray:
    """Return a table of which token (row) sees which (column), as attention computes it."""
    q, k = np.arange(length)[:, None], np.arange(length)
    return (k <= q) & (q < made["leave"][k])


@settings(max_examples=300, deadline=None)
@given(SAMPLES)
def test_tokens_of_a_tree_see_their_prefixes_only(samples: list[list[int]]) -> None:
    plan = plan_batch([{"input_ids": torch.tensor(ids)} for ids in samples], MicroBatchSpec(share_prefixes=True))
    (tree,), (members,) = plan.trees, plan.bins
    ordered = [samples[i] for i in members]
    # Every token of the stream is one prefix of a sample, which sees the prefixes of that prefix.
    prefixes = [tuple(ids[: n + 1]) for ids in ordered for n in range(len(ids))]
    stream = [prefixes[i] for i in tree.tokens]
    length = bucket(len(tree))
    made = walk([len(ids) for ids in ordered], tree, length, min(length, BLOCK))
    expected = np.eye(length, dtype=bool)
    for q, prefix in enumerate(stream):
        expected[q, : len(stream)] = [prefix[: len(other)] == other for other in stream]
    assert (visible(made, length) == expected).all()
    assert made["positions"].tolist() == [len(prefix) - 1 for prefix in stream] + [0] * (length - len(stream))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 200))
def test_blocks_of_keys_contain_every_visible_token(lengths: list[int], padding: int) -> None:
    length = bucket(sum(lengths) + padding)
    made = walk(lengths, None, length, min(length, BLOCK))
    sees, block = visible(made, length), min(length, BLOCK)
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    total = sum(lengths)
    places = np.arange(total)
    assert (sees[:total, :total] == ((starts[:, None] == starts) & (places <= places[:, None]))).all()
    assert (sees[total:] == np.eye(length, dtype=bool)[total:]).all()
    for b, first in enumerate(made["first"]):
        rows = sees[b * block : (b + 1) * block]
        assert rows.any(0).argmax() // block == first


def test_lengths_fall_into_few_buckets() -> None:
    assert [bucket(n) for n in (1, 32, 33, 65, 129, 1000, 1025, 2049, 4097)] == [
        *(32, 32, 64, 128, 256, 1024, 1152, 2304, 4608)
    ]
    for n in range(1, 20_000):
        padded = bucket(n)
        assert padded >= n
        assert padded < 32 or padded % min(padded, BLOCK) == 0
        assert n < 1024 or padded <= 1.126 * n
    octave = {bucket(n) for n in range(4097, 8193)}
    assert len(octave) == 8


@pytest.mark.parametrize(
    ("rows", "length", "padded"),
    [(1024, 1024, 1024), (513, 1024, 1024), (512, 1024, 512), (3, 1024, 32), (1500, 1024, 2048)],
)
def test_rows_are_a_power_of_two_of_the_stream(rows: int, length: int, padded: int) -> None:
    assert row_bucket(rows, length) == padded


def test_ranks_with_fewer_targets_get_as_many_as_the_others() -> None:
    def inputs(targets: torch.Tensor) -> StreamInputs:
        batch = [{"input_ids": torch.arange(5), "target_ids": targets}]
        plan = plan_batch(batch, MicroBatchSpec())
        (mb,) = plan.build(n_mbs=1, device=torch.device("cpu"), padded_length=None, layout=None, adapters=()).mbs
        return StreamInputs(mb, ("logprobs",), 1.0)

    one, three = inputs(torch.arange(5)), inputs(torch.arange(15).view(5, 3))
    sizes = Sizes.largest([one.sizes, three.sizes])
    shapes = [{name: x.shape for name, x in each.arrays(sizes, np.dtype("float32")).items()} for each in (one, three)]
    assert shapes[0] == shapes[1]
    assert shapes[0]["targets"] == (32, 3)
    computed = torch.arange(96.0).view(32, 3)
    assert torch.equal(one.result("logprobs", computed), computed[:5, 0])
    assert torch.equal(three.result("logprobs", computed), computed[:5])


@pytest.mark.parametrize("outputs", [("logprobs",), ("logprobs", "values")])
def test_outputs_of_wanted_tokens_stay_on_their_device(outputs: tuple[OutputName, ...]) -> None:
    batch = [{"input_ids": torch.arange(5), "output_mask": torch.arange(5) > 2}]
    (mb,) = (
        plan_batch(batch, MicroBatchSpec())
        .build(n_mbs=1, device=torch.device("cpu"), padded_length=None, layout=None, adapters=())
        .mbs
    )
    inputs = StreamInputs(mb, outputs, 1.0)
    result = inputs.result("logprobs", torch.zeros(32, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (5,))


def test_streams_of_a_process_are_one_micro_batch() -> None:
    """Four streams, of which one has no sequence: arrays of one size, and outputs in the order of the micro-batch."""
    lengths = (7, 3, 5)
    batch = [{"input_ids": torch.full((n,), n), "target_ids": torch.full((n,), n)} for n in lengths]
    plan = plan_batch(batch, MicroBatchSpec(max_tokens_per_mb=8), streams=4)
    (mb,) = plan.build(n_mbs=1, device=torch.device("cpu"), padded_length=None, layout=None, adapters=()).mbs
    streams = LocalStreams(mb, ("logprobs",), 1.0, 4)
    arrays = streams.arrays(streams.sizes, np.dtype("float32"))
    assert {name: x.shape[:2] for name, x in arrays.items()} == {
        **dict.fromkeys(("ids", "leave", "positions", "places", "targets", "temperature"), (4, 32)),
        "first": (4, 1),
    }
    # Nobody reads an output of padding, and a token of it sees itself only.
    assert (arrays["targets"][3] == IGNORE_INDEX).all()
    assert (arrays["leave"][3] == np.arange(1, 33)).all()
    computed = torch.from_numpy(np.where(arrays["targets"] == IGNORE_INDEX, 0, arrays["targets"]).astype("float32"))
    assert torch.equal(streams.result("logprobs", computed), mb.data["target_ids"].float())


def test_parts_of_a_stream_have_equal_numbers_of_rows() -> None:
    """With 36 rows of 8 context-parallel ranks, some would compute more than others."""
    tokens = 8 * 9 * BLOCK
    batch = [{"input_ids": torch.zeros(tokens, dtype=torch.long), "output_mask": torch.arange(tokens) < 3}]
    (mb,) = (
        plan_batch(batch, MicroBatchSpec())
        .build(n_mbs=1, device=torch.device("cpu"), padded_length=None, layout=None, adapters=())
        .mbs
    )
    inputs = StreamInputs(mb, ("logprobs",), 1.0)
    assert len(inputs.arrays(inputs.sizes, np.dtype("float32"), 8)["places"]) % 8 == 0
