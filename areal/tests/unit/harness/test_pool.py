"""Worker pool: reports of a failure, a hang and a death, and a fresh pool for the next call."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.tests.harness import pool as pool_module
from areal.tests.harness.limits import promptly
from areal.tests.harness.pool import Pool, Pools, WorldFailure
from areal.tests.harness.worker import Call

TARGETS = "areal.tests.unit.harness.pool_targets"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(2, tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 1.0)


def call(name: str, **kwargs: object) -> Call:
    return Call(TARGETS, name, kwargs)


def works(pool: Pool) -> bool:
    answers = pool.run(call("add_up", offset=3), timeout=60)
    return [answers[rank].status for rank in range(2)] == ["passed", "passed"]


def test_calls_run_on_every_rank_of_the_same_processes(pool: Pool) -> None:
    assert works(pool)
    pids = pool.pids
    assert works(pool)
    assert pool.pids == pids


def test_failure_report_has_rank_assertion_and_output(pool: Pool) -> None:
    works(pool)
    pids = pool.pids
    with pytest.raises(WorldFailure) as failure:
        pool.run(call("fail_on", rank=1), timeout=60)
    assert "rank 1 of 2 failed" in str(failure.value)
    assert "arithmetic" in str(failure.value)
    assert "assert (1 + 1) == 3" in str(failure.value)
    assert "pool_targets.py" in str(failure.value)
    assert "about to fail on 1" in pool.output(1)
    assert works(pool)
    assert not set(pool.pids) & set(pids)


def test_failed_call_does_not_wait_for_ranks_in_a_collective(pool: Pool) -> None:
    works(pool)
    with promptly(), pytest.raises(WorldFailure, match="rank 0 never arrives") as failure:
        pool.run(call("fail_alone_before_barrier"), timeout=60)
    assert "rank 1 of 2 stuck" in str(failure.value)
    assert "fail_alone_before_barrier" in str(failure.value).split("rank 1 of 2 stuck")[1]


def test_hang_is_killed_and_reports_its_stack(pool: Pool) -> None:
    works(pool)
    with pytest.raises(WorldFailure) as failure:
        pool.run(call("hang_on", rank=1), timeout=1)
    assert "rank 1 of 2 stuck" in str(failure.value)
    assert "in hang_on" in str(failure.value)
    assert works(pool)


def test_dead_worker_reports_exit_code_and_last_output(pool: Pool) -> None:
    with pytest.raises(WorldFailure) as failure:
        pool.run(call("die_on", rank=0), timeout=60)
    assert "rank 0 of 2 died:\nexit code 7" in str(failure.value)
    assert "last words" in str(failure.value)
    assert works(pool)


def test_skips_are_reported(pool: Pool) -> None:
    answers = pool.run(call("skip_all"), timeout=60)
    assert {answer.status for answer in answers.values()} == {"skipped"}
    assert answers[0].text == "not today"


def test_unpicklable_arguments_raise(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"\['offset'\] do not pickle"):
        pool.run(call("add_up", offset=threading.Lock()), timeout=60)


def test_pool_that_has_grown_is_replaced(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(pool)
    pids = pool.pids
    monkeypatch.setattr(pool_module, "GROWTH", 200 << 20)
    pool.run(call("grow", megabytes=60), timeout=60)
    assert works(pool)
    assert pool.pids == pids, "two ranks have grown by 120 MB together"
    pool.run(call("grow", megabytes=60), timeout=60)
    assert works(pool)
    assert not set(pool.pids) & set(pids)


def test_pools_of_one_size_run_at_a_time(tmp_path: Path) -> None:
    pools = Pools(tmp_path, tmp_path / "logs")
    pools[1].run(call("add_up", offset=0), timeout=60)
    assert pools[1].pids
    pools[2].run(call("add_up", offset=0), timeout=60)
    assert pools[2].pids
    assert not pools._pools[1].pids
    pools.close()


def test_what_a_test_patches_on_its_ranks_is_undone_there(pool: Pool) -> None:
    pool.run(call("patch", monkeypatch=pytest.MonkeyPatch()), timeout=60)
    pool.run(call("is_not_patched"), timeout=60)
