"""Results on the way to the driver, and the limits of hangs, without Ray's processes."""

from __future__ import annotations

import threading

import pytest
import torch

from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray.results import seal, unseal
from areal.dispatch.ray.watch import Limits
from areal.dispatch.workplace import Reply


def test_result_is_the_same_in_the_driver() -> None:
    value = {"logprobs": [torch.arange(3.0), torch.zeros(0)], "name": "step", "function": abs}
    result = unseal(seal(value, "the result", 10**6))
    assert result["name"] == "step"
    assert result["function"] is abs
    assert all(torch.equal(a, b) for a, b in zip(result["logprobs"], value["logprobs"], strict=True))


def test_limit_counts_tensors_and_everything_else() -> None:
    for value in (torch.zeros(1000, dtype=torch.uint8), "x" * 1000):
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
