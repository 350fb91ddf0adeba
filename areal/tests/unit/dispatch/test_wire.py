"""The wire format: values return bit for bit in new memory, and are sent in a few buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.api import MicroBatchSpec, NamedTensor, StepOutput, TopKOutput
from areal.dispatch.wire import Packed, pack_tensors, unpack_tensors
from areal.utils.data import read_batch
from benchmarks.dispatch import SIZES, batch_of, transfer_ms

DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)


class Pair(NamedTuple):
    left: Any
    right: Any


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int, form: str) -> Tensor:
    """Return a tensor of random bits: NaNs of any kind, infinities and denormals occur."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape, dtype=int)) * (2 if form == "strided" else 1)
    high = 2 if dtype is torch.bool else 256
    x = torch.randint(0, high, (count * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)
    if form == "strided":
        x = x[::2]
    x = x.view(shape) if x.is_contiguous() else x.as_strided(shape, tuple(2 * s for s in torch.empty(shape).stride()))
    return x.transpose(0, -1) if form == "transposed" and x.dim() > 1 else x


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.builds(
    tensor, st.sampled_from(DTYPES), SHAPES, st.integers(0, 99), st.sampled_from(["plain", "strided", "transposed"])
)
PLAIN = st.none() | st.integers() | st.text(max_size=3) | st.floats() | st.binary(max_size=3)
SAMPLES = st.builds(
    lambda keys, lengths, dtype: [{key: tensor(dtype, (n, *keys[key]), n, "plain") for key in keys} for n in lengths],
    st.dictionaries(st.sampled_from("abc"), SHAPES.filter(lambda shape: len(shape) < 3), max_size=3),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(DTYPES),
)
VALUES = st.recursive(
    TENSORS | PLAIN | SAMPLES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | inner.map(lambda value: [value] * 3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Return whether values are equal: types, structure, dtypes, shapes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        bits = [torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def travel(value: Any) -> tuple[Any, list[bytes], int]:
    """Return a value after the way to another process, its buffers, which are read-only, and the bytes that are not in buffers."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pack_tensors(value), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    return unpack_tensors(pickle.loads(data, buffers=frozen)), frozen, len(data)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_every_value_returns_bit_for_bit(value: Any) -> None:
    assert same(travel(value)[0], value)
    assert same(unpack_tensors(pack_tensors(value)), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (5,), (2, 3), (0, 3), (3, 0), (2, 1, 4)]
    alone = [tensor(dtype, shape, k, "plain") for k, shape in enumerate(shapes)]
    value = {"alone": Pair(*alone[:2]), "list": alone, "samples": [{"x": x, "y": 3} for x in alone]}
    assert same(travel(value)[0], value)
    empty = [tensor(dtype, (0,), 0, "plain")] * 2
    assert same(travel(empty)[0], empty)


def test_lazy_and_differentiable_tensors_are_copied_as_numbers() -> None:
    z = torch.view_as_complex(torch.rand(4, 2))
    weight = torch.rand(3, requires_grad=True)
    value = [z.conj(), z.conj().imag, (weight * 2), torch.arange(3.0).expand(2, 3)]
    back = travel(value)[0]
    assert all(torch.equal(a, b) for a, b in zip(back, value, strict=True))
    assert not any(x.requires_grad for x in back)


def test_unpacked_memory_is_writable_and_of_its_own() -> None:
    value = [{"x": torch.ones(3), "meta": {"table": np.ones(4)}, "y": torch.tensor(1.0)} for _ in range(2)]
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pack_tensors(value), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    first, second = (unpack_tensors(pickle.loads(data, buffers=frozen)) for _ in range(2))
    for sample in first:
        sample["x"].add_(5)
        sample["y"].zero_()
        sample["meta"]["table"][:] = 7
    assert same(second, value)
    assert same(unpack_tensors(pickle.loads(data, buffers=frozen)), value)
    # Not even within one process.
    packed = pack_tensors(value)
    unpack_tensors(packed)[0]["x"].zero_()
    assert same(unpack_tensors(packed), value)
    value[0]["x"].zero_()
    assert unpack_tensors(packed)[0]["x"].tolist() == [1.0] * 3


def test_one_meta_of_all_samples_stays_one() -> None:
    """The engine requires one object where values cannot be compared."""
    meta = {"table": np.arange(3), "nested": {"x": [1, 2]}}
    batch = [{"input_ids": torch.ones(n, dtype=torch.int64), "meta": meta} for n in (2, 3, 4)]
    back = travel(batch)[0]
    assert all(sample["meta"] is back[0]["meta"] for sample in back)
    assert same(dict(read_batch(back, MicroBatchSpec()).meta), meta)


def test_objects_that_are_not_containers_are_pickled_as_usual() -> None:
    step = StepOutput(loss=1.5, terms={"loss": 1.5}, timings={"forward": 0.1})
    parameter = torch.nn.Parameter(torch.rand(2))
    sparse = torch.eye(3).to_sparse()
    back = travel({"step": step, "parameter": parameter, "sparse": sparse, "dtype": torch.bfloat16})[0]
    assert back["step"] == step
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert torch.equal(back["parameter"], parameter)
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert back["dtype"] is torch.bfloat16


# ---- buffers


def batch(count: int) -> list[dict[str, Any]]:
    meta = {"step": 1}
    return [
        {"input_ids": torch.arange(n), "loss_mask": torch.ones(n), "reward": torch.tensor(0.5), "meta": meta}
        for n in range(1, count + 1)
    ]


def padded() -> dict[str, Any]:
    return {
        key: torch.ones(64, 9, dtype=dtype)
        for key, dtype in (("a", torch.int64), ("b", torch.float32), ("c", torch.int64))
    }


BUFFERS: dict[str, tuple[Callable[[], Any], int]] = {
    "one array for each key of a list": (lambda: batch(64), 3),
    "one array for each dtype of a padded batch": (padded, 2),
    "outputs by name": (
        lambda: {
            "logprobs": [torch.ones(5)] * 9,
            "topk": TopKOutput([torch.ones(2, 3)] * 9, [torch.ones(2, 3).long()] * 9),
        },
        2,
    ),
    "named tensors": (lambda: [NamedTensor(f"w{i}", torch.ones(i, 3, dtype=torch.bfloat16)) for i in range(500)], 1),
    "a result without tensors": (lambda: StepOutput(loss=1.0, terms={}), 0),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_value_travels_in_few_buffers(name: str) -> None:
    make, count = BUFFERS[name]
    value = make()
    _, buffers, rest = travel(value)
    assert len(buffers) == count
    # The remainder does not grow with the tokens.
    assert rest < 1000 + 40 * (len(value) if isinstance(value, list) else 0)
    packed = pack_tensors(value)
    assert packed.nbytes == sum(map(len, buffers))
    assert isinstance(packed, Packed)


@pytest.mark.parametrize("size", SIZES)
def test_a_shard_is_put_and_read_for_an_eighth_of_the_plain_cost(size: str) -> None:
    samples = batch_of(*SIZES[size])
    # On a busy machine, one measurement of three may be wrong.
    ratios: list[float] = []
    while len(ratios) < 3 and max(ratios, default=0.0) < 8:
        plain, packed = (sum(times) for times in transfer_ms(samples, rounds=3))
        ratios.append(plain / packed)
    assert max(ratios) >= 8
