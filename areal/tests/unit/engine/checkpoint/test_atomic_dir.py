"""Checkpoint directories appear complete or not at all, even if the writer is killed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.engine.checkpoint import atomic_dir as module
from areal.engine.checkpoint.async_save import CheckpointSaver, SaveTask, WrittenFiles
from areal.engine.checkpoint.atomic_dir import (
    MANIFEST,
    Manifest,
    discard,
    is_complete,
    open_draft,
    prune,
    publish,
    read_manifest,
    record,
    verify,
)
from areal.utils.distributed import ControlPlane


def save(path: Path, text: str) -> None:
    """Write a checkpoint of two files."""
    draft = open_draft(path)
    (draft / "sub").mkdir()
    (draft / "a.txt").write_text(text)
    (draft / "sub" / "b.bin").write_bytes(os.urandom(100))
    publish(draft, path, "test", [record(draft, "a.txt"), record(draft, "sub/b.bin")], {"text": text})


def content(path: Path) -> str:
    assert verify(path).about == {"text": (path / "a.txt").read_text()}
    return (path / "a.txt").read_text()


def hidden(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.fixture(params=["exchange", "two renames"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with one atomic exchange and with two renames, as on file systems without an exchange."""
    if request.param == "two renames":
        monkeypatch.setattr(module, "_swap", lambda first, second: False)
    return request.param


@pytest.mark.usefixtures("each_way")
def test_publish_creates_and_replaces_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert not is_complete(path)
    save(path, "one")
    assert content(path) == "one"
    save(path, "two")
    assert content(path) == "two"
    assert hidden(tmp_path) == []


def test_publish_uses_atomic_exchange_if_available(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if not module._swap(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two paths")
    assert (tmp_path / "b" / "x").exists()


def test_publish_accepts_empty_and_raises_on_non_empty_directory(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    save(empty, "one")
    assert content(empty) == "one"
    full.mkdir()
    (full / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"full.*would replace.*choose another path"):
        open_draft(full)
    assert (full / "model.safetensors").exists()


RENAMES = ("rename", "unlink", "rmdir", "mkdir")


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("step", range(14))
def test_kill_at_any_step_leaves_old_or_new_directory(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count directory changes and stop at number ``step``, as a kill would."""
    path = tmp_path / "checkpoint"
    save(path, "one")
    left = [step]

    def guard(name: str) -> None:
        original = getattr(Path, name)

        def call(*args: object, **kwargs: object) -> object:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return original(*args, **kwargs)

        monkeypatch.setattr(Path, name, call)

    with monkeypatch.context() as patched:
        for name in RENAMES:
            guard(name)
        patched.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)
        done = False
        try:
            save(path, "two")
            done = True
        except KeyboardInterrupt:
            pass
    monkeypatch.undo()
    assert is_complete(path)
    assert content(path) in (("two",) if done else ("one", "two"))
    save(path, "three")
    assert content(path) == "three"
    assert hidden(tmp_path) == []


def test_reader_restores_previous_directory_between_two_renames(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    path.rename(tmp_path / ".checkpoint.previous")
    assert is_complete(path)
    assert content(path) == "one"


def test_directory_of_a_model_names_its_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no manifest\.json; it is the directory of a model.*weight_format='hf'"):
        read_manifest(tmp_path)


def damage_size(path: Path) -> None:
    (path / "a.txt").write_text("o")


def damage_value(path: Path) -> None:
    (path / "sub" / "b.bin").write_bytes(bytes(100))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "a.txt").unlink(), r"a\.txt is missing"),
        (damage_size, r"a\.txt is damaged: it has 1 bytes instead of 3"),
        (damage_value, r"b\.bin is damaged: its checksum"),
        (lambda path: (path / MANIFEST).unlink(), r"checkpoint is no complete checkpoint: it has no manifest\.json"),
        (lambda path: (path / MANIFEST).write_text("{"), r"manifest\.json is damaged"),
        (lambda path: (path / MANIFEST).write_text("[]"), r"manifest\.json is damaged"),
        (
            lambda path: (path / MANIFEST).write_text('{"format": 9}'),
            r"manifest\.json has format 9, and this version reads 1",
        ),
    ],
)
def test_verify_names_the_damaged_file(damage: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    damage(path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        verify(path)


def test_sharded_verification_covers_every_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    damage_value(path)
    assert [is_verified(path, shard) for shard in range(3)].count(False) == 1


def is_verified(path: Path, shard: int) -> bool:
    try:
        verify(path, shard=shard, shards=3)
    except ValueError:
        return False
    return True


def test_publish_raises_without_a_shared_directory(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    draft = open_draft(path)
    (draft / "a.txt").write_text("one")
    files = [record(draft, "a.txt")]
    (draft / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a\.txt was written by another rank.*shared directory"):
        publish(draft, path, "test", files, {})
    assert not is_complete(path)


def test_retention_keeps_newest_by_publication(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        save(tmp_path / name, name)
    (tmp_path / "other").mkdir()
    os.utime(tmp_path / "c")
    save(tmp_path / "a", "again")  # the oldest is now c, then b
    assert prune(tmp_path, 2) == [tmp_path / "c"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "other"]
    assert prune(tmp_path, 2) == []
    assert [read_manifest(tmp_path / name).sequence for name in ("b", "a")] == [3, 4]


def test_retention_keeps_the_source(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save(tmp_path / name, name)
    assert prune(tmp_path, 1, source=tmp_path / "a") == [tmp_path / "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_drafts_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """Create drafts of an ended process, of a running one (pytest's parent), and of another machine."""
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    own_draft = open_draft(tmp_path / "other").name
    pid = re.compile(rf"-{os.getpid()}-")
    of_dead = pid.sub(f"-{int(dead.stdout)}-", own_draft)
    of_living = pid.sub(f"-{os.getppid()}-", own_draft)
    elsewhere = own_draft.replace(module.socket.gethostname(), "elsewhere.example")
    old_elsewhere = elsewhere + "1"
    for name in (of_dead, of_living, elsewhere, old_elsewhere):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    os.utime(tmp_path / old_elsewhere, (0, 0))
    discard(open_draft(tmp_path / "checkpoint"))
    assert set(hidden(tmp_path)) == {own_draft, of_living, elsewhere}
    discard(open_draft(tmp_path / "other"))
    assert set(hidden(tmp_path)) == {of_living}


def test_manifest_round_trips_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    manifest = read_manifest(path)
    assert isinstance(manifest, Manifest)
    assert (manifest.kind, manifest.sequence, manifest.about) == ("test", 1, {"text": "one"})
    assert [(file.name, file.size) for file in manifest.files] == [("a.txt", 3), ("sub/b.bin", 100)]


# ---- a save that fails

TORCH_SAYS = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"


def writes_in_vain() -> WrittenFiles:
    raise RuntimeError(TORCH_SAYS)


@pytest.mark.parametrize(
    ("free", "says"), [(4096, r"No space left on device: free some.*unexpected pos"), (2**30, "enforce fail")]
)
def test_full_disk_is_named(free: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    saver = CheckpointSaver(ControlPlane(alone=True))
    task = SaveTask(writes_in_vain, lambda payloads: [], {})
    with pytest.raises(RuntimeError, match=rf"(?s){says}.*nothing was saved to {tmp_path / 'run'}"):
        saver.save(tmp_path / "run", "dcp", lambda draft: task)
    assert not list(tmp_path.iterdir())
