"""Validation of training samples: every fault is a user error that names it, before compute, in milliseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal.tests.harness.lines import lines_of
from areal.tests.unit.tinker.service.fakes import (
    LIMITS,
    LOSSES,
    capabilities,
    datum,
    digest,
    floats,
    integers,
    tokens,
    train,
)
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import PreparedBatch
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.requests import RawChunk, RawDatum, RawTensor
from areal.tinker.service.verbs.forward_backward import ForwardBackward

MODEL = TrainedModel("m", "session", "local", "base", "adamw")
TARGETS, WEIGHTS = integers(2, 3, 4), floats(0, 1, 1)


def check(data: Any, loss: str = "cross_entropy", config: Any = None, most: int = 2**20) -> PreparedBatch:
    request = train("m", 1, data=data, loss_fn=loss, loss_fn_config=config or {})
    return request.check(MODEL, capabilities(max_dense_elements=most))


def one(prompt: Any = None, **inputs: Any) -> list[RawDatum]:
    """One good sample, in which ``inputs`` replace what is given. ``None`` removes an input."""
    values = {"target_tokens": TARGETS, "weights": WEIGHTS} | inputs
    return [RawDatum(tokens(1, 2, 3) if prompt is None else prompt, {k: v for k, v in values.items() if v is not None})]


def csr(values: Any, crow: Any, col: Any, shape: Any = (3, 2), dtype: str = "float32") -> RawTensor:
    kind = np.float32 if dtype == "float32" else np.int64
    crow, col = (None if x is None else np.asarray(x, dtype=np.int64) for x in (crow, col))
    return RawTensor(dtype, np.asarray(values, dtype=kind), shape, crow, col)


SPARSE_TARGETS = csr([5, 6, 7], [0, 2, 2, 3], [0, 1, 1], dtype="int64")


def test_dense_samples_keep_their_content() -> None:
    batch = check(one() + one(tokens(7), target_tokens=integers(9), weights=floats(-3.5)))
    assert [d.input_ids.tolist() for d in batch.data] == [[1, 2, 3], [7]]
    assert [d.target_ids.tolist() for d in batch.data] == [[2, 3, 4], [9]]
    assert [d.values["weights"].tolist() for d in batch.data] == [[0, 1, 1], [-3.5]]
    assert batch.data[0].input_ids.dtype == batch.data[0].target_ids.dtype == np.int64
    assert batch.data[0].values["weights"].dtype == np.float32
    # Several chunks are one input.
    assert check(one([*tokens(1), *tokens(2, 3)])).data[0].input_ids.tolist() == [1, 2, 3]


def test_two_dimensional_and_sparse_targets_are_dense_afterwards() -> None:
    shaped = check(one(target_tokens=integers(*range(6), shape=(3, 2)), weights=floats(*range(6), shape=(3, 2)))).data[
        0
    ]
    assert shaped.target_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    # A flat list of values has the shape of the targets.
    assert check(one(target_tokens=integers(*range(6), shape=(3, 2)), weights=floats(*range(6)))).data[0].values[
        "weights"
    ].shape == (3, 2)
    sparse = check(one(target_tokens=SPARSE_TARGETS, weights=csr([0.5, 1, 2], [0, 2, 2, 3], [0, 1, 1]))).data[0]
    assert sparse.target_ids.tolist() == [[5, 6], [0, 0], [0, 7]]
    assert sparse.values["weights"].tolist() == [[0.5, 1], [0, 0], [0, 2]]


def test_optional_inputs_may_be_given_in_some_samples() -> None:
    base = {"target_tokens": TARGETS, "logprobs": floats(-1, -1, -1), "advantages": floats(1, 1, 1)}
    data = [RawDatum(tokens(1, 2, 3), base | extra) for extra in ({}, {"sequence_ratio_mask": floats(0, 1, 1)})]
    batch = check(data, "ppo", {"clip_low_threshold": 0.5})
    assert [sorted(d.values) for d in batch.data] == [
        ["advantages", "logprobs"],
        ["advantages", "logprobs", "sequence_ratio_mask"],
    ]
    assert batch.config == {"clip_low_threshold": 0.5}


def sparse(targets: RawTensor) -> list[RawDatum]:
    return one(target_tokens=targets, weights=floats(*range(6)))


IMAGE = [*tokens(1, 2), RawChunk("image")]
BAD: dict[str, tuple[Any, str]] = {
    "no data": ([], "data is empty"),
    "empty sample": (one([]), r"data\[0\].model_input is empty"),
    "empty chunk": (one(tokens()), r"data\[0\].model_input is empty"),
    "too long": (one(tokens(*[1] * 33)), "has 33 tokens: at most 32"),
    "image": (one(IMAGE), "chunk of kind 'image'"),
    "id above": (one(tokens(1, 64, 2)), r"data\[0\] has the id 64 in model_input: ids must be from 0 to 63"),
    "id below": (one(tokens(1, -1, 2)), "has the id -1"),
    "target above": (one() + one(target_tokens=integers(1, 2, 99)), r"data\[1\] has the id 99 in target_tokens"),
    "target length": (one(target_tokens=integers(1, 2)), r"'target_tokens'\] has the shape \[2\]"),
    "weights length": (one(weights=floats(1, 2)), r"'weights'\] has the shape \[2\]"),
    "NaN": (one() + one(weights=floats(1, float("nan"), 1)), r"data\[1\].*'weights'\] has a NaN"),
    "infinite": (one(weights=floats(1, float("inf"), 1)), "infinite"),
    "beyond float32": (one(weights=RawTensor("float32", np.asarray([1.0, 1e300, 1.0]))), "infinite"),
    "missing": (one(weights=None), r"lacks \['weights'\]"),
    "unknown": (one(mask=floats(1, 1, 1)), r"unknown keys \['mask'\]"),
    "float targets": (one(target_tokens=floats(1, 2, 3)), "has the dtype 'float32': it must be int64"),
    "integer weights": (one(weights=integers(1, 2, 3)), "has the dtype 'int64': it must be float32"),
    "false dtype": (one(target_tokens=RawTensor("int64", np.asarray([1.5, 2, 3]))), "not of the dtype int64"),
    "three dimensions": (one(target_tokens=integers(*range(3), shape=(3, 1, 1))), r"\[3, 1, 1\]"),
    "no columns": (one(target_tokens=integers(shape=(3, 0))), r"\[3, 0\]"),
    "negative shape": (one(target_tokens=integers(1, 2, 3, shape=(3, -1))), r"\[3, -1\]"),
    "elements": (one(target_tokens=integers(1, 2, 3, shape=(3, 2))), "has 3 elements"),
    "shapes differ": (one(weights=floats(*range(6), shape=(3, 2))), "must be that of target_tokens"),
    "too many elements": (one(target_tokens=csr([], [0, 0, 0, 0], [], (3, 2**62), "int64"), weights=None), "lacks"),
    "sparse without a shape": (one(target_tokens=csr([5], [0, 1, 1, 1], [0], None, "int64")), "has no shape"),
    "sparse in one dimension": (one(weights=csr([1], [0, 1, 1, 1], [0], (3,))), "needs crow_indices"),
    "falling rows": (sparse(csr([5, 6], [0, 2, 1, 2], [0, 1], dtype="int64")), "wrong crow_indices"),
    "short rows": (sparse(csr([5], [0, 1], [0], dtype="int64")), "wrong crow_indices"),
    "rows end early": (sparse(csr([5, 6], [0, 1, 1, 1], [0, 1], dtype="int64")), "wrong crow_indices"),
    "column outside": (sparse(csr([5], [0, 1, 1, 1], [2], dtype="int64")), "col_indices from 2 to 2"),
    "negative column": (sparse(csr([5], [0, 1, 1, 1], [-1], dtype="int64")), "col_indices from -1"),
    "columns": (sparse(csr([5, 6], [0, 2, 2, 2], [0], dtype="int64")), "1 col_indices for 2"),
    "no columns given": (sparse(csr([5], [0, 1, 1, 1], None, dtype="int64")), "needs crow_indices"),
    "same place": (sparse(csr([5, 6], [0, 2, 2, 2], [1, 1], dtype="int64")), "two elements in the same"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_fault_is_named(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(UserError, match=message):
        check(data)


def test_losses_settings_and_sizes_are_checked() -> None:
    for loss in ("stable_reinforce", "custom", "ce"):
        with pytest.raises(UserError, match=f"loss_fn is '{loss}': this server supports cross_entropy, ppo"):
            check(one(), loss)
    with pytest.raises(UserError, match=r"unknown keys \['beta'\]: supported are \[\]"):
        check(one(), config={"beta": 1.0})
    for value in (float("nan"), True, None):
        with pytest.raises(UserError, match="clip_low_threshold"):
            check(one(), "ppo", {"clip_low_threshold": value})
    # A few bytes of a sparse tensor must not become gigabytes.
    wide = csr([], [0, 0, 0, 0], [], (3, 2**40), "int64")
    with pytest.raises(UserError, match="more than 1048576 elements"):
        check(one(target_tokens=wide, weights=csr([], [0, 0, 0, 0], [], (3, 2**40))))


def test_cost_of_a_check_is_of_the_samples_and_not_of_their_tokens() -> None:
    """A thousand samples take 30 ms. A loop over the tokens would run 24 more lines for each sample."""

    def lines_per_sample(n: int, tokens: int) -> float:
        ids, ones = np.arange(tokens) % 64, np.ones(tokens, np.float32)
        inputs = {
            "target_tokens": RawTensor("int64", ids, (tokens,)),
            "weights": RawTensor("float32", ones, (tokens,)),
        }
        data = [RawDatum([RawChunk("encoded_text", ids)], inputs) for _ in range(n)]
        request, server = ForwardBackward("m", 1, digest(1), data=data), capabilities()
        return lines_of(lambda: request.check(MODEL, server)) / n

    lines_per_sample(1, 8)  # what is computed once
    few, many, longer = lines_per_sample(64, 8), lines_per_sample(1024, 8), lines_per_sample(64, 32)
    assert 0 < max(many, longer) < 1.25 * few


small = st.integers(-2, 70)
arrays = st.one_of(
    st.lists(small, max_size=5).map(lambda x: np.asarray(x, dtype=np.int64)),
    st.lists(st.floats(width=32), max_size=5).map(lambda x: np.asarray(x, dtype=np.float32)),
)
indices = st.one_of(st.none(), st.lists(st.integers(-2, 5), max_size=5).map(lambda x: np.asarray(x, dtype=np.int64)))
tensors = st.builds(
    RawTensor,
    st.sampled_from(["float32", "int64", "int32", "bfloat16", "text"]),
    arrays,
    st.one_of(st.none(), st.lists(st.integers(-1, 4), max_size=3).map(tuple)),
    indices,
    indices,
)
chunks = st.one_of(
    st.builds(
        RawChunk, st.just("encoded_text"), st.lists(small, max_size=4).map(lambda x: np.asarray(x, dtype=np.int64))
    ),
    st.builds(RawChunk, st.sampled_from(["image", "dmel", "encoded_text"])),
)
data = st.one_of(
    st.just(datum()),
    st.builds(
        RawDatum,
        st.lists(chunks, max_size=2),
        st.dictionaries(st.sampled_from(["target_tokens", "weights", "logprobs", "x"]), tensors, max_size=3),
    ),
)


@given(
    st.lists(data, max_size=3),
    st.sampled_from(["cross_entropy", "ppo", "x"]),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=1),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_whatever_is_sent_is_prepared_or_refused_as_a_users_error(data: Any, loss: str, config: Any) -> None:
    try:
        batch = check(data, loss, config)
    except UserError:
        return
    # Samples that pass keep the contract of backends.
    for d in batch.data:
        assert 0 < len(d.input_ids) <= LIMITS.max_tokens
        assert len(d.target_ids) == len(d.input_ids)
        for ids in (d.input_ids, d.target_ids):
            assert ids.dtype == np.int64
            assert ((ids >= 0) & (ids < LIMITS.vocab_size)).all()
        assert LOSSES[loss]["inputs"] <= {"target_tokens", *d.values}
        for values in d.values.values():
            assert values.dtype == np.float32
            assert values.shape == d.target_ids.shape
            assert np.isfinite(values).all()
