"""Transactions on one thread, migrations, and the lease by which one server at a time owns the database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, delete, event, insert, inspect, make_url, select, text, update

from areal.tinker.service.errors import DiskFullError, LeaseLostError
from areal.tinker.service.store.disk import DiskReserve, is_disk_full
from areal.tinker.service.store.tables import lease

_T = TypeVar("_T")

Write = Callable[[Connection], Any]
"""Statements of a transaction. May run twice, and then only the second time counts."""

_MOST_WRITES = 64
"""Writes of one transaction."""

_CLOCKS = {
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
}
"""Time of the database in seconds: two servers may have different clocks."""

_OWNER = select(lease).with_for_update(read=True)

logger = logging.getLogger(__name__)


class Database:
    """A database that one server owns by a lease.

    Each method runs a function with a connection, in a transaction, on the only thread that uses the database. A transaction that writes first
    checks the lease, so that a server that lost it changes nothing.

    Args:
        url: SQLAlchemy URL.
        lease_s: seconds for which the lease is valid.
        on_lost: called once if the lease is lost.
        reserve_bytes: bytes of disk next to a database of SQLite that are kept for the time when the disk is full.
    """

    def __init__(
        self,
        url: str,
        lease_s: float,
        on_lost: Callable[[LeaseLostError], None] = lambda error: None,
        reserve_bytes: int = 0,
    ) -> None:
        self._url = url.replace("postgresql://", "postgresql+psycopg://", 1)
        self._reserve = DiskReserve(_reserve_file(url) if reserve_bytes else None, reserve_bytes)
        self._full = False
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._me = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(1, "tinker-database")
        self._engine: Engine | None = None
        self._beat: asyncio.Task[None] | None = None
        self._lost: LeaseLostError | None = None
        self._closed = False
        # Writes that arrive while a transaction runs share the next one.
        self._writes: deque[tuple[Write, asyncio.Future[Any]]] = deque()
        self._writer: asyncio.Task[None] | None = None

    @property
    def lost(self) -> LeaseLostError | None:
        """Error of a lost lease."""
        return self._lost

    @property
    def full(self) -> bool:
        """True from a write that finds the disk full until the disk has room for the reserve."""
        return self._full

    def check_room(self) -> None:
        """Raise a :class:`DiskFullError` while the room that is left belongs to the database."""
        if self._full:
            raise DiskFullError(
                "the disk of the server is full, and nothing is saved until it has room: delete checkpoints, or ask the operator"
            )

    async def open(self) -> None:
        """Take the lease, run the migrations, and keep the lease from now on.

        Raises:
            RuntimeError: another server owns the database. Names its host and process.
        """
        try:
            await self._run(self._connect)
            await self._take_lease()
            await self._run(self._migrate)
            await self._run(self._restore_reserve)
        except BaseException:
            await self.close()
            raise
        self._beat = asyncio.get_running_loop().create_task(self._keep_lease())

    async def close(self) -> None:
        """Give up the lease and close the connections. May be called twice, and after an :meth:`open` that failed."""
        if self._closed:
            return
        self._closed = True
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            self._beat = None
            # A lease that cannot be deleted expires.
            with contextlib.suppress(Exception):
                await self.write(lambda connection: connection.execute(delete(lease)))
        await self._run(self._disconnect)
        self._thread.shutdown(wait=False)

    async def write(self, work: Callable[[Connection], _T]) -> _T:
        """Run ``work`` in a transaction of the owner, which several writes may share. Each of them fails alone.

        Raises:
            LeaseLostError: another server owns the database. Nothing was written.
        """
        if self._lost is not None:
            raise self._lost
        loop = asyncio.get_running_loop()
        written: asyncio.Future[_T] = loop.create_future()
        self._writes.append((work, written))
        if self._writer is None:
            self._writer = loop.create_task(self._write_all())
        try:
            return await written
        except LeaseLostError as error:
            self._lose(error)
            raise

    async def _write_all(self) -> None:
        """Write until nothing waits."""
        while self._writes:
            group = [self._writes.popleft() for _ in range(min(len(self._writes), _MOST_WRITES))]
            try:
                results = await self._run(self._transact_together, [work for work, _ in group])
            except Exception as error:
                results = [error] * len(group)
            for (_, written), result in zip(group, results, strict=True):
                # The task that waited may be cancelled.
                if not written.done() and isinstance(result, Exception):
                    written.set_exception(result)
                elif not written.done():
                    written.set_result(result)
        self._writer = None

    async def read(self, work: Callable[[Connection], _T]) -> _T:
        """Run ``work``, which only reads."""
        return await self._run(self._transact, work, False)

    # ------------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        """Open the engine. Transactions of SQLite take the write lock when they begin, so that the check of the lease holds until they end."""
        kind = make_url(self._url).get_backend_name()
        if kind not in _CLOCKS:
            raise ValueError(f"database_url is of {kind}: SQLite and PostgreSQL are supported")
        try:
            self._engine = create_engine(self._url, pool_pre_ping=kind != "sqlite")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"database_url is of {kind}, whose driver {error.name} is missing: install {error.name}[binary]"
            ) from error
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _configure_sqlite)
            event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    def _disconnect(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def _transact(self, work: Callable[[Connection], _T], owned: bool) -> _T:
        """Run a transaction. One that finds the disk full runs again after the reserve is released."""
        try:
            return self._attempt(work, owned)
        except Exception as error:
            if not is_disk_full(error):
                raise
            self._full = True
            if self._reserve.release():
                return self._transact(work, owned)
            raise DiskFullError(
                f"the disk of the database is full: delete checkpoints, or make room ({error})"
            ) from error

    def _restore_reserve(self) -> None:
        self._full = not self._reserve.fill()

    def _attempt(self, work: Callable[[Connection], _T], owned: bool) -> _T:
        if self._engine is None:
            raise RuntimeError("the database is closed")
        with self._engine.begin() as connection:
            if owned:
                owner = connection.execute(_OWNER).mappings().first()
                if owner is None or owner["owner"] != self._me:
                    raise _lost_to(owner)
            return work(connection)

    def _transact_together(self, works: list[Write]) -> list[Any]:
        """Run writes in one transaction. If one fails, each has its own. Returns a value or an error for each."""
        if len(works) > 1:
            with contextlib.suppress(Exception):
                return self._transact(lambda connection: [work(connection) for work in works], True)
        results: list[Any] = []
        for work in works:
            try:
                results.append(self._transact(work, True))
            except Exception as error:
                results.append(error)
        return results

    def _migrate(self) -> None:
        """Run the revisions that the database does not have."""
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.set_main_option("path_separator", "os")

        def upgrade(connection: Connection) -> None:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

        self._transact(upgrade, owned=True)

    def _try_lease(self, renew: bool) -> tuple[Any, float]:
        """Take or renew the lease. Returns the row of another owner, or ``None``, and the time of the database."""

        def work(connection: Connection) -> tuple[Any, float]:
            now = float(connection.execute(text(_CLOCKS[connection.dialect.name])).scalar_one())
            # The first server creates the table of the lease: migrations run only under a lease.
            if not renew and not inspect(connection).has_table(lease.name):
                lease.create(connection)
            # The row of another owner stays until it expires, or its process is known to be dead.
            row = connection.execute(select(lease).with_for_update()).mappings().first()
            if row is not None and row["owner"] != self._me and (renew or (row["expires"] > now and not _is_dead(row))):
                return dict(row), now
            mine = {"owner": self._me, "host": socket.gethostname(), "pid": os.getpid(), "pid_space": _pid_space()}
            mine |= {"expires": now + self._lease_s}
            connection.execute(insert(lease).values(id=1, **mine) if row is None else update(lease).values(**mine))
            return None, now

        return self._transact(work, owned=False)

    # ------------------------------------------------------------------ on the loop

    async def _run(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _take_lease(self) -> None:
        """Take the lease. That of a killed server is not renewed: wait until it expires. Refuse to start once its owner renews it."""
        first: dict[str, Any] | None = None
        while True:
            row, now = await self._run(self._try_lease, False)
            if row is None:
                return
            if first is not None and (row["owner"], row["expires"]) != (first["owner"], first["expires"]):
                raise RuntimeError(
                    f"another server owns the database {_shown(self._url)}: process {row['pid']} on {row['host']}. "
                    "Stop it first, or give this server its own database and root folder"
                )
            if first is None:
                logger.info("waiting for the lease of process %s on %s, which may be dead", row["pid"], row["host"])
            first = row
            # An owner renews four times in this time.
            await asyncio.sleep(max(0.01, min(self._lease_s / 3, row["expires"] - now + 0.01)))

    async def _keep_lease(self) -> None:
        """Renew the lease until it is lost. The lease counts as lost if the database is unreachable for its time."""
        renewed = time.monotonic()
        while self._lost is None:
            await asyncio.sleep(self._lease_s / 4)
            try:
                row, _ = await self._run(self._try_lease, True)
                await self._run(self._restore_reserve)
            except DiskFullError as error:
                # No other server can write, either.
                logger.error("the lease could not be renewed: %s", error)
                renewed = time.monotonic()
                continue
            except Exception as error:
                logger.exception("the lease could not be renewed")
                if time.monotonic() - renewed > self._lease_s:
                    self._lose(LeaseLostError(f"the lease could not be renewed for {self._lease_s} s: {error}"))
                continue
            if row is not None:
                self._lose(_lost_to(row))
            renewed = time.monotonic()

    def _lose(self, error: LeaseLostError) -> None:
        if self._lost is None:
            self._lost = error
            logger.error("%s", error)
            self._on_lost(error)


def _reserve_file(url: str) -> Path | None:
    """Return the file of the reserve next to the database of a URL."""
    parsed = make_url(url)
    file = parsed.database if parsed.get_backend_name() == "sqlite" else None
    return None if file is None or file == ":memory:" else Path(file).with_suffix(".reserve")


def _pid_space() -> str:
    """Return a name of the boot and the namespace in which process ids are unique."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_dead(owner: Any) -> bool:
    """Return whether the owner of a lease is a process of this machine that does not exist. Others are dead once their lease expires."""
    if not owner["pid_space"] or owner["pid_space"] != _pid_space():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _configure_sqlite(connection: Any, record: Any) -> None:
    """Write-ahead log: a committed transaction survives the end of the process, and readers do not block. SQLAlchemy begins transactions."""
    connection.isolation_level = None
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}")


def _lost_to(owner: Any) -> LeaseLostError:
    by = "its row is gone" if owner is None else f"process {owner['pid']} on {owner['host']} owns the database"
    return LeaseLostError(f"this server lost its lease: {by}. It has stopped writing")


def _shown(url: str) -> str:
    """URL without its password."""
    return url if "@" not in url else url.split("://")[0] + "://…@" + url.rsplit("@", 1)[1]
