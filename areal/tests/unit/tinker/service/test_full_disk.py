"""A full disk: saves fail alone, deletes make room, the lease lives, health says so; the reserve of the database."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from areal.tests.unit.tinker.service.fakes import (
    FakeSampling,
    FakeTraining,
    digest,
    done,
    eventually,
    new_model,
    refused,
    sample,
    serving,
    step,
    train,
)
from areal.tinker.service.errors import DiskFullError
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.disk import DiskReserve, is_disk_full
from areal.tinker.service.store.files import CheckpointFiles
from areal.tinker.service.verbs.weights import SaveForSampler, SaveWeights

MIB = 2**20


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Disk:
    """A disk on which writes of the database fail while it has no room. The reserve of the database is room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = 0
        self.size = 100 * MIB
        attempt = Database._attempt

        def attempt_on_disk(database: Database, work: Callable[..., Any], owned: bool) -> Any:
            # Reads are not owned, and write nothing; those of the lease are not, either.
            if (owned or "_try_lease" in work.__qualname__) and self.free(database._reserve) < 4096:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return attempt(database, work, owned)

        monkeypatch.setattr(Database, "_attempt", attempt_on_disk)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(self.size, 0, self.room(Path(folder))))

    def room(self, root: Path) -> int:
        files = sum(file.stat().st_size for file in root.rglob("*") if file.is_file() and file.suffix != ".db-wal")
        return self.size - self.others - files

    def free(self, reserve: DiskReserve) -> int:
        return self.size if reserve._file is None else self.room(reserve._file.parent)

    def fill(self, root: Path) -> None:
        """Let another program take all the room."""
        self.others += max(0, self.room(root))


def test_on_a_full_disk_only_saves_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    write_state = FakeTraining._write

    def write(training: FakeTraining, model_id: str, folder: Path) -> None:
        write_state(training, model_id, folder)
        (folder / "weights").write_bytes(bytes(8 * MIB))

    monkeypatch.setattr(FakeTraining, "_write", write)

    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), FakeSampling(), lease_s=2.0) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            await done(service, SaveWeights(model, 1, digest(1), path="one"))
            assert service.parts.trouble() is None
            disk.fill(tmp_path)
            # The reserve is used by the first write that finds no room.
            try:
                await done(service, train(model, 2))
            except DiskFullError as error:
                raise AssertionError("the reserve was not used") from error
            assert "disk is full" in (service.parts.trouble() or "")
            assert not (await service.status())["healthy"]
            for seq, request in (
                (3, SaveWeights(model, 3, digest(3), path="two")),
                (4, SaveForSampler(model, 4, digest(4))),
            ):
                assert "disk of the server is full" in await refused(service, request, "server"), seq
            # Steps, samples, new sessions and models go on.
            await done(service, step(model, 5, learning_rate=1.0))
            await done(service, sample(await service.create_sampling_session(session, 0, base_model="base")))
            await new_model(service)
            # Longer than the lease.
            await asyncio.sleep(3.0)
            await service.heartbeat(session)
            await done(service, step(model, 6, learning_rate=1.0))
            # A delete makes room, and the reserve comes back.
            await service.delete_checkpoint(model, "weights/one")
            await eventually(lambda: service.parts.trouble() is None)
            await done(service, SaveWeights(model, 7, digest(7), path="two"))
            assert [f.name.split("@")[0] for f in tmp_path.glob("checkpoints/*/*/*") if f.is_dir()] == ["two"]

    asyncio.run(main())


def test_a_delete_makes_room_when_the_reserve_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)

    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), lease_s=2.0) as service:
            model = await new_model(service)
            path = (await done(service, SaveWeights(model, 1, digest(1), path="one")))["path"]
            (await service.checkpoint_folder(path) / "weights").write_bytes(bytes(8 * MIB))
            disk.fill(tmp_path)
            await done(service, train(model, 2))
            disk.fill(tmp_path)
            # Nothing can be stored, which the client hears; the lease outlives its time.
            with pytest.raises(DiskFullError, match="delete checkpoints"):
                await service.submit(step(model, 3, learning_rate=1.0))
            await asyncio.sleep(3.0)
            assert service.parts.database.lost is None
            await service.delete_checkpoint(model, "weights/one")
            assert (await service.all_checkpoints())["checkpoints"] == []
            await done(service, step(model, 3, learning_rate=1.0))

    asyncio.run(main())


def test_a_save_whose_description_cannot_be_written_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(files: CheckpointFiles, folder: Path, description: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            model = await new_model(service)
            with monkeypatch.context() as patch:
                patch.setattr(CheckpointFiles, "publish", publish)
                assert "No space" in await refused(service, SaveWeights(model, 1, digest(1), path="one"), "server")
            assert (await service.checkpoints(model))["checkpoints"] == []
            assert list(tmp_path.glob("checkpoints/*/*/*")) == []
            await done(service, SaveWeights(model, 2, digest(2), path="one"))

    asyncio.run(main())


def test_a_delete_that_is_interrupted_leaves_what_a_start_cleans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            model = await new_model(service)
            await done(service, SaveWeights(model, 1, digest(1), path="one"))
            with monkeypatch.context() as patch:
                patch.setattr(CheckpointFiles, "remove", lambda files, *folders: None)
                await service.delete_checkpoint(model, "weights/one")
            assert len(list(tmp_path.glob("checkpoints/*/weights/*"))) == 1
        async with serving(tmp_path, FakeTraining()):
            assert list(tmp_path.glob("checkpoints/*/weights/*")) == []

    asyncio.run(main())


# ---- reserve


def test_the_reserve_is_filled_if_the_disk_has_room_for_twice_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = [Usage(100 * MIB, 0, 100 * MIB)]
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage[0])
    reserve = DiskReserve(tmp_path / "x.reserve", 4 * MIB)
    assert not reserve.release()
    assert reserve.fill()
    assert (tmp_path / "x.reserve").stat().st_size == 4 * MIB
    assert reserve.release()
    usage[0] = Usage(100 * MIB, 0, 8 * MIB - 1)
    assert not reserve.fill()
    # At most a tenth of the disk.
    usage[0] = Usage(10 * MIB, 0, 3 * MIB)
    assert reserve.fill()
    assert (tmp_path / "x.reserve").stat().st_size == MIB
    # A database elsewhere has none.
    assert DiskReserve(None, MIB).fill()
    assert not DiskReserve(None, MIB).release()


def test_errors_of_a_full_disk_are_recognised(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "x.db")
    database.execute("CREATE TABLE t (x BLOB)")
    database.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as full:
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    with pytest.raises(sqlite3.OperationalError) as wrong:
        database.execute("SELECT * FROM missing")
    assert is_disk_full(full.value)
    assert not is_disk_full(wrong.value)
    assert is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_disk_full(OSError(errno.ENOENT, "No such file"))
