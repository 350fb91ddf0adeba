"""One rank of a pool: joins the world, then calls test functions on request and sends the outcome of each."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from _pytest import outcomes
from _pytest._code import ExceptionInfo
from _pytest.assertion import register_assert_rewrite
from _pytest.assertion import util as assertion_util
from _pytest.config import Config, get_config

from areal.tests.everyday.costs import spent
from areal.tests.harness.programs import compile_once_in_a_world
from areal.tests.harness.world import World, enter, take_records

REWRITTEN = ("areal.tests.grid.compare", "areal.tests.dist", "areal.tests.unit")
"""Modules whose ``assert`` shows the compared values, in addition to test modules that pytest collects."""


@dataclass(frozen=True)
class Call:
    """A test function to call: ``qualname`` in ``module`` with ``kwargs``."""

    module: str
    qualname: str
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """How a call went on one rank.

    Attributes:
        status: ``passed``, ``failed``, ``skipped`` or ``xfailed``; the parent adds ``died`` and ``stuck``.
        text: the traceback, or the reason.
        records: what the test recorded for the tables at the end of the session.
        seconds: CPU-seconds that the call took on this rank.
        grown: bytes of memory by which the process has grown since it started.
    """

    status: str
    text: str = ""
    records: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    seconds: float = 0.0
    grown: int = 0


@dataclass(frozen=True)
class Seat:
    """Start parameters of a worker: rank, process id and store of the parent, directories shared with other ranks, first calls."""

    rank: int
    size: int
    parent: int
    port: int
    cache: Path
    log: Path
    timeout: timedelta
    first: tuple[Call, ...] = ()


def serve(connection: Connection, seat: Seat) -> None:
    """Answer calls until the parent hangs up. The target of a worker process."""
    gc.freeze()  # what was imported before the fork stays: no collection need look at it, nor copy its pages
    _redirect_output(seat.log)
    _die_with(seat.parent)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a pool is a world of CPU ranks; GPUs are for torchrun, one per rank
    torch.set_num_threads(1)
    enter(World(seat.rank, seat.size, seat.cache))
    compile_once_in_a_world()
    rewrite_assertions()
    store = dist.TCPStore("127.0.0.1", seat.port, is_master=False, timeout=seat.timeout)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=seat.timeout)
    connection.send(next((it for it in map(answer, seat.first) if it.status != "passed"), Answer("passed")))
    at_start = resident()
    while True:
        try:
            call = connection.recv()
        except EOFError:
            os._exit(0)
        before = spent()
        answered = answer(call)
        connection.send(replace(answered, seconds=spent() - before, grown=resident() - at_start))
        # The objects that outlive a test are caches. destroy() collects twice per engine and need not scan them each time.
        gc.collect()
        gc.freeze()


def resident() -> int:
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def answer(call: Call) -> Answer:
    """Call a test function and say how it went."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        function = reduce(_member, call.qualname.split("."), importlib.import_module(call.module))
        function(**call.kwargs)
    except outcomes.Skipped as skipped:
        return Answer("skipped", str(skipped.msg), take_records())
    except outcomes.XFailed as xfailed:
        return Answer("xfailed", str(xfailed.msg), take_records())
    except (Exception, outcomes.Failed, SystemExit, KeyboardInterrupt):
        return Answer("failed", format_exception(), take_records())
    finally:
        # The copy of the fixture that patched this process; the session undoes its own.
        for value in call.kwargs.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()
        sys.stdout.flush()
        sys.stderr.flush()
    return Answer("passed", "", take_records())


def format_exception() -> str:
    """The current exception as pytest prints it, from the test function on."""
    error = ExceptionInfo.from_current()
    inner = error.traceback.filter(lambda entry: Path(str(entry.path)).name not in ("worker.py", "conftest.py"))
    if inner:
        error.traceback = inner
    return str(error.getrepr(style="short", abspath=False))


def rewrite_assertions() -> None:
    """Make ``assert`` in test modules say what it compared, as it does in pytest itself."""
    config = get_config()
    config.parse(["--noconftest", "-p", "no:cacheprovider"])
    register_assert_rewrite(*REWRITTEN)

    def explain(op: str, left: object, right: object) -> str | None:
        return _explain(config, op, left, right)

    assertion_util._reprcompare = explain


def _explain(config: Config, op: str, left: object, right: object) -> str | None:
    for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
        if lines:
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
    return None


def _member(owner: Any, name: str) -> Any:
    """A function of a module, or of a fresh instance of a test class."""
    return getattr(owner() if isinstance(owner, type) else owner, name)


def _redirect_output(log: Path) -> None:
    """Send what this process prints to a file, where SIGUSR1 adds the stacks of all threads."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _die_with(parent: int) -> None:
    """A worker whose parent was killed might otherwise go on for ever."""

    def watch() -> None:
        while True:
            time.sleep(1)
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
