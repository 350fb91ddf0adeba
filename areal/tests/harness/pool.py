"""Runs world tests from a plain ``pytest``: persistent worker processes, one pool for each world size, started when first needed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch.distributed as dist

from areal.tests.harness.worker import Answer, Call, Seat, serve

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""Of the workers' default process group: a collective that some rank never joins fails then."""

START_TIMEOUT = 120.0
"""Seconds for the workers of a pool to import torch and to meet."""

GRACE = 10.0
"""Seconds that other ranks still have once one rank has failed or died: mostly they hang in a collective with it."""

GROWTH = 1 << 30
"""Bytes by which the workers of a pool may grow together: a pool that has grown more is replaced."""

PRELOADED = [
    "areal.tests.harness.worker",
    "areal.tests.grid.cell_engine",
    "areal.engine.fsdp.engine",
    "transformers.models.auto.modeling_auto",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gemma3", "gpt2", "llama", "qwen2", "qwen3", "qwen3_moe")
    ),
]
"""Imported once, before workers are forked, if they are installed; no module whose ``assert`` is rewritten, which is up to the workers."""

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


RECORD = "areal_record"
"""Name of the property of a report that holds a row of a table: it goes with the report to where the tables are printed."""


class WorldFailure(Exception):
    """Some rank failed, died or got stuck; the message names the ranks and shows what each said."""

    def __init__(self, answers: Mapping[int, Answer]) -> None:
        self.answers = dict(answers)
        super().__init__(_describe(self.answers))


class Pool:
    """The workers of one world size. A failing call ends them all, because their collectives may then be out of step.

    Args:
        size: number of ranks.
        cache: a directory that tests share.
        logs: a directory of this session, for the output of the workers; defaults to ``cache``.

    Attributes:
        first: what workers call when they start, before anything else.
        grace: seconds that the other ranks still have after this answer of a rank that failed or died.
    """

    def __init__(self, size: int, cache: Path, logs: Path | None = None) -> None:
        self.size = size
        self.first: tuple[Call, ...] = ()
        self.grace: Callable[[Answer], float] = _default_grace
        self.logs = [(logs or cache) / f"world{size}-rank{rank}.log" for rank in range(size)]
        self._cache = cache
        self._store: dist.TCPStore | None = None
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._marks = [0] * size
        self._grown = 0

    @property
    def pids(self) -> list[int | None]:
        """Process ids by rank; empty when the pool is down."""
        return [process.pid for process, _ in self._workers]

    def run(self, call: Call, timeout: float) -> dict[int, Answer]:
        """Call a function on every rank.

        Args:
            call: what to call.
            timeout: seconds that it may take.

        Returns:
            The answers by rank: all passed, or all skipped, or all expected to fail.

        Raises:
            WorldFailure: anything else. The pool is then down, and the next call starts a new one.
            ValueError: an argument cannot be sent to another process.
        """
        try:
            payload = pickle.dumps(call)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{call.qualname} runs in other processes, and its arguments {list(call.kwargs)} do not pickle: {error}"
            ) from None
        if self._grown > GROWTH:
            self.close()
        if not self._workers:
            self._start()
        self._marks = [log.stat().st_size for log in self.logs]
        answers: dict[int, Answer] = {}
        for rank, (_, connection) in enumerate(self._workers):
            try:
                connection.send_bytes(payload)
            except OSError:
                answers[rank] = self._died(rank)
        answers |= self._collect(timeout, answers)
        if len({answer.status for answer in answers.values()}) > 1 or answers[0].status not in (
            "passed",
            "skipped",
            "xfailed",
        ):
            self.close()
            raise WorldFailure(answers)
        self._grown = sum(answer.grown for answer in answers.values())
        return answers

    def output(self, rank: int) -> str:
        """Return the output of a rank since the start of the last call."""
        with open(self.logs[rank], errors="replace") as log:
            log.seek(self._marks[rank])
            return log.read()

    def close(self) -> None:
        """Kill the workers. The pool starts again with the next call."""
        for process, _ in self._workers:
            process.kill()
        for process, connection in self._workers:
            process.join()
            connection.close()
        self._workers, self._store, self._grown = [], None, 0

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
        self._marks = [log.stat().st_size if log.exists() else 0 for log in self.logs]
        with _environment(_ONE_THREAD):
            for rank, log in enumerate(self.logs):
                ours, theirs = context.Pipe()
                seat = Seat(
                    rank, self.size, os.getpid(), self._store.port, self._cache, log, COLLECTIVE_TIMEOUT, self.first
                )
                process = context.Process(
                    target=serve, args=(theirs, seat), name=f"world{self.size}-rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        answers = self._collect(START_TIMEOUT, {})
        if any(answer.status != "passed" for answer in answers.values()):
            self.close()
            raise WorldFailure(answers)

    def _collect(self, timeout: float, answers: dict[int, Answer]) -> dict[int, Answer]:
        deadline = time.monotonic() + timeout
        for answer in answers.values():
            deadline = min(deadline, time.monotonic() + self.grace(answer))
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers) if rank not in answers}
        answers = dict(answers)
        while ranks:
            ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers | self._stuck(list(ranks.values()), timeout)
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = self._died(rank)
                if answers[rank].status in ("failed", "died"):
                    deadline = min(deadline, time.monotonic() + self.grace(answers[rank]))
        return answers

    def _died(self, rank: int) -> Answer:
        process = self._workers[rank][0]
        process.join(5)
        return Answer(
            "died", f"exit code {process.exitcode}; the last that it printed:\n{_tail(self.output(rank), 40)}"
        )

    def _stuck(self, ranks: list[int], timeout: float) -> dict[int, Answer]:
        for rank in ranks:
            pid = self._workers[rank][0].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        why = f"no answer (limit {timeout:g} s, or less after another rank failed); stacks and last output"
        return {rank: Answer("stuck", f"{why}:\n{_tail(self.output(rank), 60)}") for rank in ranks}


class Pools:
    """The pools of a session, by world size. At most one is running, because tests of a size follow one another.

    Attributes:
        cache, logs, first, grace: those of every pool.
    """

    def __init__(self, cache: Path, logs: Path) -> None:
        self.first: tuple[Call, ...] = ()
        self.grace: Callable[[Answer], float] = _default_grace
        self.cache, self.logs = cache, logs
        logs.mkdir(parents=True, exist_ok=True)
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, size: int) -> Pool:
        for other in self._pools.keys() - {size}:
            self._pools[other].close()
        if size not in self._pools:
            self._pools[size] = Pool(size, self.cache, self.logs)
        self._pools[size].first, self._pools[size].grace = self.first, self.grace
        return self._pools[size]

    def close(self) -> None:
        """Kill every worker."""
        for pool in self._pools.values():
            pool.close()


pools_key = pytest.StashKey[Pools]()
"""The pools in the stash of a session's configuration."""


def _default_grace(answer: Answer) -> float:
    return GRACE


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a child process reads at its start, and put them back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _describe(answers: Mapping[int, Answer]) -> str:
    """Ranks that said the same are named together; those that passed go without saying."""
    said: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(answers):
        if answers[rank].status == "passed":
            continue
        said.setdefault((answers[rank].status, answers[rank].text), []).append(rank)
    order = {"died": 0, "failed": 1, "stuck": 2}
    messages = []
    for (status, text), ranks in sorted(said.items(), key=lambda entry: (order.get(entry[0][0], 3), entry[1])):
        names = "rank" + ("s " if len(ranks) > 1 else " ") + ", ".join(map(str, ranks))
        messages.append(f"{names} of {len(answers)} {status}" + (f":\n{text}" if text else ""))
    return "\n\n".join(messages)


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])
