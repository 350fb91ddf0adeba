"""Results on the way to the driver, and the limits of hangs, without Ray's processes."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import Reply
from areal.dispatch.ray.results import seal, seal_batch, unseal
from areal.dispatch.ray.watch import Limits


def test_result_is_the_same_in_the_driver() -> None:
    value = {"logprobs": [torch.arange(3.0), torch.zeros(0)], "name": "step", "function": abs}
    result = unseal(seal(value, "the result", 10**6))
    assert result["name"] == "step"
    assert result["function"] is abs
    assert all(torch.equal(a, b) for a, b in zip(result["logprobs"], value["logprobs"], strict=True))


def test_arrays_in_any_object_are_read_into_new_memory() -> None:
    """The object store is read-only for arrays, but not for the tensors on them, which would change the memory of another rank."""
    array = np.arange(4.0)
    sent = seal_batch([{"input_ids": torch.arange(2), "meta": {"table": Table(array), "empty": Table(np.zeros(0))}}])
    assert sum(buffer.nbytes for buffer in sent.buffers) == array.nbytes
    stored = dataclasses.replace(sent, buffers=tuple(frozen(buffer) for buffer in sent.buffers))
    first, second = unseal(stored)[0]["meta"], unseal(stored)[0]["meta"]
    assert first["table"].array.flags.writeable
    first["table"].array[0] = 7.0
    assert first["table"].array.tolist() == [7.0, 1.0, 2.0, 3.0]
    assert second["table"].array.tolist() == array.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second["empty"].array.shape == (0,)


@dataclass
class Table:
    """An object that is not a container."""

    array: np.ndarray[Any, Any]


def frozen(buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array that is read-only, as in the object store."""
    buffer = buffer.copy()
    buffer.flags.writeable = False
    return buffer


def test_batch_that_does_not_pickle_raises() -> None:
    with pytest.raises(
        ValueError, match=r"the batch cannot be sent to the ranks: cannot pickle '_thread.lock'.*run\(fn\)"
    ):
        seal_batch([{"input_ids": torch.arange(2), "meta": {"lock": threading.Lock()}}])


def test_limit_counts_tensors_and_everything_else() -> None:
    for value in (torch.zeros(1000, dtype=torch.uint8), np.zeros(1000, dtype=np.uint8), "x" * 1000):
        assert unseal(seal(value, "the result", 2000)) is not None
        with pytest.raises(ValueError, match=r"the result of save has 1,\d{3} bytes, and max_result_bytes = 999"):
            seal(value, "the result of save", 999)


def test_result_that_does_not_pickle_raises() -> None:
    with pytest.raises(
        ValueError, match=r"the result of run cannot be sent to the driver: cannot pickle '_thread.lock'"
    ):
        seal([threading.Lock()], "the result of run", 10**6)


def test_limit_of_hangs_depends_on_the_errors_so_far() -> None:
    limits = Limits(hang_seconds=600.0, grace_seconds=30.0)
    assert limits.of([None, Reply(1)]) == 600.0
    assert limits.of([None, Reply(None, "ValueError", "bad")]) == 30.0
    assert limits.of([None, Reply(None, "RankLostError", "rank 0 is lost")]) == 5.0
    assert Limits(2.0, 30.0).of([None, Reply(None, "ValueError", "bad")]) == 2.0


def test_error_of_a_lost_process_pickles() -> None:
    error = WorkerLostError("rank 1 died", 1, "10.0.0.1", 42, "last line")
    assert (str(error), error.rank, error.node, error.pid, error.output) == (
        "rank 1 died",
        1,
        "10.0.0.1",
        42,
        "last line",
    )
    copy = error.__reduce__()
    again = copy[0](*copy[1])
    assert vars(again) == vars(error)
    assert str(again) == str(error)
