"""Two processes run functions: order of calls, what is sent, results and errors."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from areal.dispatch.ray import RayWorkers
from areal.dispatch.ray.stored import FUNCTIONS, SmallBatch, StoredBatch, StoredHandle
from areal.dispatch.stored_samples import StoredShard
from areal.tests.dispatch_ray import functions
from areal.tests.dispatch_ray.conftest import LIMIT
from areal.tests.dispatch_ray.functions import run, start
from areal.tests.harness.limits import PROMPTLY, wait_until
from areal.utils.remote_traceback import RemoteTraceback


def test_ranks_join_one_world(pair: RayWorkers) -> None:
    assert run(pair, functions.rank_and_size) == [(0, 2), (1, 2)]
    assert run(pair, functions.all_reduce, [1.0, 2.0]) == [3.0, 3.0]


def test_environment_is_that_of_torchrun_and_of_the_caller(pair: RayWorkers) -> None:
    """Both processes see no accelerator, and share the node."""
    for rank, its in enumerate(run(pair, functions.environment)):
        assert (its["RANK"], its["WORLD_SIZE"]) == (str(rank), "2")
        assert (its["LOCAL_RANK"], its["LOCAL_WORLD_SIZE"]) == (str(rank), "2")
        assert its["OMP_NUM_THREADS"] == "1"


def test_threads_reach_both_ranks_in_one_order(pair: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pair, functions.noted)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # interrupts threads between the submissions to the two ranks
    try:
        with ThreadPoolExecutor(4) as threads:
            calls = threads.map(lambda token: start(pair, functions.note, [token, token]), range(200))
            for pending in calls:
                pending.result(60.0)
    finally:
        sys.setswitchinterval(before)
    first, second = run(pair, functions.noted)
    assert sorted(first) == list(range(200))
    assert first == second


@pytest.mark.parametrize(("length", "kind"), [(5, SmallBatch), (20_000, StoredBatch)])
def test_batch_is_stored_once_for_all_ranks(pair: RayWorkers, length: int, kind: type) -> None:
    before = pair.store.batches
    batch = [{"input_ids": torch.arange(length), "loss_mask": torch.ones(5)}, {"input_ids": torch.arange(3)}]
    handle = pair.put(batch)
    assert isinstance(handle, kind)
    for its in run(pair, functions.get, [handle, handle]):
        assert [sorted(sample) for sample in its] == [["input_ids", "loss_mask"], ["input_ids"]]
        assert torch.equal(its[0]["input_ids"], torch.arange(length))
    assert pair.store.batches == before + 1
    # A batch that cannot be sent is refused in the driver.
    with pytest.raises(ValueError, match="the batch cannot be sent to the ranks"):
        pair.put([{"input_ids": torch.arange(5), "meta": {"lock": threading.Lock()}}])


def test_rank_that_writes_into_its_batch_changes_that_of_no_other(pair: RayWorkers) -> None:
    """Also into an array inside of an object, which Ray maps to memory that all ranks share."""
    handle = pair.put({"input_ids": torch.zeros(1, 3), "meta": {"object": SimpleNamespace(array=np.zeros(2**15))}})
    assert run(pair, functions.write_on_rank_0, [handle] * 2) == [[1.0] * 3, [0.0] * 3]
    for batch in run(pair, functions.get, [handle] * 2):
        assert not batch["input_ids"].any()
        assert not batch["meta"]["object"].array.any()


def test_what_is_no_tensor_is_stored_if_it_is_large(pair: RayWorkers) -> None:
    assert isinstance(pair.put([{"image": bytes(2**20)}]), StoredBatch)


def test_batch_that_cannot_be_sent_raises(pair: RayWorkers) -> None:
    before = pair.store.batches
    with pytest.raises(ValueError, match=r"the batch cannot be sent to the ranks: cannot pickle '_thread\.lock'"):
        pair.put([{"input_ids": torch.arange(5), "lock": threading.Lock()}])
    assert pair.store.batches == before


def test_handle_of_many_references_is_stored_for_its_readers(pair: RayWorkers) -> None:
    """The objects that it refers to exist as long as its reference, also without another one."""
    handles = tuple(pair.put([{"x": torch.full((2,), n)}], keep=True) for n in range(64))
    pieces = [(n, ("x",), ("x",), (n,), (0,)) for n in range(64)]
    shard = StoredShard(handles, pickle.dumps(([("x",)] * 64, pieces)), None)
    assert pair.share(shard, 1000, 64, 1) is shard
    shared = pair.share(shard, 1000, 64, 2)
    assert isinstance(shared, StoredHandle)
    del handles, shard
    for its in run(pair, functions.get, [shared, shared]):
        assert [sample["x"].tolist() for sample in its] == [[n, n] for n in range(64)]


# ---- functions


def test_function_is_stored_once_as_long_as_it_does_not_change(pair: RayWorkers) -> None:
    def scaled(scale: int) -> Any:
        return lambda rank_objects: scale * rank_objects.rank

    before = pair.store.functions
    for scale in (2, 2, 3, 2):
        handle = pair.ship(scaled(scale), "fn")
        assert run(pair, functions.call, [handle, handle]) == [0, scale]
    assert pair.store.functions == before + 2


def test_store_has_the_functions_of_the_last_calls_only(pair: RayWorkers) -> None:
    """Ray keeps an object as long as the driver runs, if another than itself has pickled its reference."""
    references = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    stored = []
    for n in range(FUNCTIONS + 8):
        handle = pair.ship(lambda rank_objects, n=n: n + rank_objects.rank, "fn")
        stored.append(handle.ref.hex().encode())
        assert run(pair, partial(functions.call_shared, handle)) == [n, n + 1]
    del handle

    def kept() -> list[bytes]:
        return [its for its in stored if its in references()]

    wait_until(lambda: kept() == stored[8:], "the first functions leave the store", PROMPTLY)


def test_function_with_a_lock_raises_before_any_rank_runs(pair: RayWorkers) -> None:
    lock = threading.Lock()

    def locked(rank_objects: Any) -> bool:
        return lock.locked()

    with pytest.raises(
        ValueError, match=r"loss_fn = .*locked cannot be sent to the ranks: cannot pickle '_thread.lock'"
    ):
        pair.ship(locked, "loss_fn")


def test_function_of_a_module_that_ranks_cannot_import_raises(
    pair: RayWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_here")
    exec("def helper(rank_objects):\n    return rank_objects.rank + 10\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    before = pair.store.functions
    with pytest.raises(
        ValueError,
        match=r"loss_fn = only_here.helper cannot be loaded on the ranks: ModuleNotFoundError.*register_pickle_by_value",
    ):
        pair.ship(module.helper, "loss_fn")
    # The way out that the error names.
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        handle = pair.ship(module.helper, "loss_fn")
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
    assert run(pair, functions.call, [handle, handle]) == [10, 11]
    assert pair.store.functions == before + 2


# ---- results and errors


@pytest.mark.parametrize("kind", [ValueError, ArithmeticError])
def test_error_of_one_rank_has_its_rank_and_the_remote_traceback(pair: RayWorkers, kind: type[Exception]) -> None:
    text = "rank 1: a bad value" if kind is ValueError else "rank 1: ArithmeticError: a bad value"
    with pytest.raises(ValueError if kind is ValueError else RuntimeError) as raised:
        run(pair, functions.fail_on_rank_1, [kind, kind])
    assert str(raised.value) == text
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "in fail_on_rank_1" in str(raised.value.__cause__)
    assert run(pair, functions.rank_and_size) == [(0, 2), (1, 2)]


def test_result_above_the_limit_raises(pair: RayWorkers) -> None:
    sizes = [8, LIMIT // 2]
    assert [result.nbytes for result in run(pair, functions.zeros, [sizes, sizes])] == sizes
    sizes = [8, LIMIT + 1]
    with pytest.raises(
        ValueError,
        match=r"the result of forward_batch on rank 1 has 1,04[89],\d{3} bytes, and max_result_bytes = 1,048,576",
    ):
        run(pair, functions.zeros, [sizes, sizes], "forward_batch")
    assert run(pair, functions.rank_and_size) == [(0, 2), (1, 2)]


def test_result_that_cannot_be_sent_raises(pair: RayWorkers) -> None:
    handle = pair.ship(lambda rank_objects: threading.Lock(), "fn")
    with pytest.raises(ValueError, match=r"the result of run on rank 0 cannot be sent to the driver: .*lock"):
        run(pair, functions.call, [handle, handle], "run")


def test_argument_that_cannot_be_sent_raises(pair: RayWorkers) -> None:
    with pytest.raises(ValueError, match="the arguments of run cannot be sent to the ranks"):
        run(pair, partial(functions.get, lock=threading.Lock()), what="run")
    assert run(pair, functions.rank_and_size) == [(0, 2), (1, 2)]
