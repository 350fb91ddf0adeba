"""pytest hooks: a test marked ``@pytest.mark.world(1, 2, 4)`` is called on every rank of a world of each of these sizes.

In a plain ``pytest`` the worlds are pools of worker processes. Under torchrun there is one world, that of torchrun, and tests
of other sizes are left out. ``world(..., timeout=seconds)`` limits the time of a test. A parameter may carry a mark with one size.
A test gets its parameters and ``tmp_path`` (the same directory on all ranks), and ``world_size`` if it asks.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest import outcomes

from areal.tests.everyday.costs import COST, spent
from areal.tests.everyday.rule import mark_everyday, world_size
from areal.tests.harness.pool import RECORD, Pools, WorldFailure, pools_key
from areal.tests.harness.programs import share_programs
from areal.tests.harness.refused import refused_by_old_release
from areal.tests.harness.torchrun import Outcome, TorchrunWorld, time_limit
from areal.tests.harness.worker import REWRITTEN, Call, format_exception
from areal.tests.harness.world import World, enter, take_records
from areal.tests.mutants.passed import add_passed

pytest.register_assert_rewrite(*REWRITTEN)

DEFAULT_TIMEOUT = 120.0
UNDER_TORCHRUN = "WORLD_SIZE" in os.environ and "RANK" in os.environ

scratch_key = pytest.StashKey[Path]()
torchrun_key = pytest.StashKey[TorchrunWorld]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plant", default="", metavar="BUGS", help="bugs to plant after the tests: all, changed[:REF], K/N, or names"
    )
    parser.addoption("--only-planted", action="store_true", help="leave out the tests themselves")
    parser.addoption("--keep", default="", metavar="DIR", help="keep caches and the names of passed tests, for --plant")
    parser.addoption(
        "--kills", type=int, default=2, metavar="N", help="SIGKILLs of a server of areal/tests/tinker/restarts"
    )
    parser.addoption("--costs", default="", metavar="FILE", help="write the CPU-seconds of each test to a file")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # as in the workers: many processes share this machine
    if UNDER_TORCHRUN and int(os.environ["RANK"]) > 0:
        config.option.verbose = -2  # what fails on any rank is reported by all, so one may speak for them
    if config.getoption("plant"):
        if UNDER_TORCHRUN:
            raise pytest.UsageError("--plant starts workers of its own: run pytest without torchrun")
        # A session that only hands out the tests need not import the bugs, and with them every engine.
        if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
            config.pluginmanager.import_plugin("areal.tests.mutants.plugin")


def pytest_sessionstart(session: pytest.Session) -> None:
    workerinput = getattr(session.config, "workerinput", {})
    # Not in pytest's own directory, which other sessions on this machine clear. Sessions that share the work share the cache.
    kept = session.config.getoption("keep")
    scratch = Path(workerinput.get("areal_scratch") or kept or tempfile.mkdtemp(prefix="areal-tests-")).absolute()
    session.config.stash[scratch_key] = scratch
    # Kept for the next run: JAX names a compiled program by its code, its options and the versions of the compiler.
    share_programs(session.config.rootpath / "build" / "test-cache" / "jax-programs")
    if UNDER_TORCHRUN:
        ranks = session.config.stash[torchrun_key] = TorchrunWorld()
        scratch = ranks.gather(scratch, timeout=60.0)[0]
        enter(World(ranks.rank, ranks.size, scratch))
        return
    enter(World(0, 1, scratch))
    session.config.stash[pools_key] = Pools(scratch, scratch / "logs" / workerinput.get("workerid", "main"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["areal_scratch"] = str(node.config.stash[scratch_key])


@pytest.hookimpl(trylast=True)  # the sessions that share the directory have ended by then
def pytest_sessionfinish(session: pytest.Session) -> None:
    if pools_key in session.config.stash:
        session.config.stash[pools_key].close()
    if torchrun_key in session.config.stash:
        session.config.stash[torchrun_key].leave()
    if not hasattr(session.config, "workerinput") and not session.config.getoption("keep"):
        shutil.rmtree(session.config.stash[scratch_key], ignore_errors=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = next(iter(metafunc.definition.iter_markers("world")), None)
    if marker is None:
        return
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    sizes = [int(os.environ["WORLD_SIZE"])] if UNDER_TORCHRUN else list(marker.args)
    metafunc.parametrize("world_size", sizes, ids=[f"w{size}" for size in sizes])


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_everyday(items)
    if importlib.util.find_spec("jax") is None:
        for item in items:
            if "jax:" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs the extra jax"))
    for item in items:
        if UNDER_TORCHRUN and item.get_closest_marker("own_world"):
            item.add_marker(pytest.mark.skip(reason="starts worlds of its own, which torchrun's ranks would do each"))
        marker = item.get_closest_marker("world")
        if marker is not None:  # the world's own limit comes first: it says more
            item.add_marker(pytest.mark.timeout(_limit(marker) + 240))
    if UNDER_TORCHRUN:
        _keep_size(config, items, int(os.environ["WORLD_SIZE"]))
    else:
        # Sessions that share the work take runs of tests: with the worlds in order, most need a pool of one size.
        # The tests with Ray come first: one session runs them all, before another one takes tests from it.
        items.sort(key=lambda item: ("dispatch_ray" not in item.nodeid, -world_size(item)))
    # The items stay until the end: no collection within a test need look at them.
    gc.collect()
    gc.freeze()


def _keep_size(config: pytest.Config, items: list[pytest.Item], size: int) -> None:
    """Deselect the tests of other world sizes."""
    markers = [item.get_closest_marker("world") for item in items]
    fits = [marker is None or size in marker.args for marker in markers]
    drop = [item for item, kept in zip(items, fits, strict=True) if not kept]
    if drop:
        config.hook.pytest_deselected(items=drop)
        items[:] = [item for item, kept in zip(items, fits, strict=True) if kept]


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty directory; for a world test the same on every rank."""
    if UNDER_TORCHRUN and request.node.get_closest_marker("world"):
        return request.config.stash[torchrun_key].gather(tmp_path, timeout=DEFAULT_TIMEOUT)[0]
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("world")
    if marker is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    kwargs = {name: pyfuncitem.funcargs[name] for name in names}
    if UNDER_TORCHRUN:
        _call_here(pyfuncitem, kwargs, _limit(marker))
    else:
        _call_in_pool(pyfuncitem, world_size(pyfuncitem), kwargs, _limit(marker))
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A report with a node comes from a session that shares the work, which has written its id.
    if report.when == "call" and report.passed and not hasattr(report, "node"):
        add_passed(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Skip a test of what the library refuses with an old release of another package."""
    report = yield
    reason = refused_by_old_release(str(call.excinfo.value)) if report.failed and call.excinfo else None
    if reason is not None:
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count the CPU-seconds of a test in this process; those of ranks are counted there."""
    if not isinstance(item, pytest.Function):
        return (yield)  # a planted bug, which runs tests
    if world_size(item) == 0 and pools_key in item.config.stash:
        item.config.stash[pools_key].close()
    before = spent()
    try:
        return (yield)
    finally:
        item.user_properties.append((COST, spent() - before))
        item.user_properties += [(RECORD, record) for record in take_records()]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tables: dict[str, list[tuple[str, dict[str, str]]]] = {}
    reports = [report for group in terminalreporter.stats.values() for report in group]
    for report in reports:
        if getattr(report, "when", None) == "call":
            for _, (table, row, columns) in filter(lambda entry: entry[0] == RECORD, report.user_properties):
                tables.setdefault(table, []).append((row, columns))
    if UNDER_TORCHRUN and int(os.environ["RANK"]) > 0:
        return
    if config.getoption("costs"):
        called = [report for report in reports if getattr(report, "when", None) == "call"]
        costs = {
            report.nodeid: sum(seconds for name, seconds in report.user_properties if name == COST) for report in called
        }
        path = Path(config.getoption("costs"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(costs, indent=0))
    for table, rows in tables.items():
        terminalreporter.section(f"{table} ({len(rows)})")
        width = max(len(row) for row, _ in rows)
        for row, columns in sorted(rows, key=lambda entry: entry[0]):
            terminalreporter.line(f"{row:{width}}  " + "  ".join(f"{name} {value}" for name, value in columns.items()))


def _limit(marker: pytest.Mark) -> float:
    return float(marker.kwargs.get("timeout", DEFAULT_TIMEOUT))


def _call_in_pool(item: pytest.Function, size: int, kwargs: dict[str, Any], limit: float) -> None:
    pool = item.config.stash[pools_key][size]
    qualname = item.originalname if item.cls is None else f"{item.cls.__qualname__}.{item.originalname}"
    failure = ""
    try:
        answers = pool.run(Call(item.module.__name__, qualname, kwargs), limit)
    except WorldFailure as error:
        failure = str(error)
    if failure:
        for rank in range(size):
            item.add_report_section("call", f"output of rank {rank}", pool.output(rank))
        pytest.fail(failure, pytrace=False)
    item.user_properties += [(RECORD, record) for record in answers[0].records]
    item.user_properties.append((COST, sum(answer.seconds for answer in answers.values())))
    if answers[0].status == "skipped":
        pytest.skip(answers[0].text)
    if answers[0].status == "xfailed":
        pytest.xfail(answers[0].text)


def _call_here(item: pytest.Function, kwargs: dict[str, Any], limit: float) -> None:
    ranks = item.config.stash[torchrun_key]
    mine = Outcome("passed")
    error: BaseException | None = None
    try:
        with time_limit(limit):
            item.obj(**kwargs)
    except outcomes.Skipped as skipped:
        mine, error = Outcome("skipped", str(skipped.msg)), skipped
    except outcomes.XFailed as xfailed:
        mine, error = Outcome("xfailed", str(xfailed.msg)), xfailed
    except (Exception, outcomes.Failed) as failed:
        mine, error = Outcome("failed", format_exception()), failed
    everyone = ranks.gather(mine, timeout=limit + 120)
    item.user_properties += [(RECORD, record) for record in take_records()]
    if len({outcome.status for outcome in everyone}) == 1 and mine.status != "failed":
        if error is not None:
            raise error
        return
    ranks.rejoin()
    said = [
        f"rank {rank} of {ranks.size} {its.status}:\n{its.text}"
        for rank, its in enumerate(everyone)
        if its.status != "passed"
    ]
    pytest.fail("\n\n".join(said), pytrace=False)
