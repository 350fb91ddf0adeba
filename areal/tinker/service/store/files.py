"""Folders of checkpoints under a root that no name or path of a client can leave.

A folder is written once. Its name ends with an id that no other folder has, so that an overwrite is a new folder and a changed row.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.tinker.backends.errors import UserError

_SEGMENTS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
_KINDS = {segment: kind for kind, segment in _SEGMENTS.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,127}", re.ASCII)
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,10}", re.ASCII)
_PATH = re.compile(rf"tinker://({_RUN.pattern})/({'|'.join(_KINDS)})/({_NAME.pattern})", re.ASCII)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointPath:
    """Parsed path of a checkpoint. ``kind`` is ``training``, ``sampler`` or ``external``."""

    run_id: str
    kind: str
    name: str

    @property
    def checkpoint_id(self) -> str:
        """Id within the run, such as ``weights/final``."""
        return f"{_SEGMENTS[self.kind]}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.checkpoint_id}"


def parse_path(path: Any) -> CheckpointPath:
    """Return the parts of a path of the protocol."""
    match = _PATH.fullmatch(path) if isinstance(path, str) and len(path) <= 512 else None
    if match is None:
        raise UserError(
            f"path is {str(path)[:200]!r}: it must be tinker://<run>/weights/<name> or tinker://<run>/sampler_weights/<name>, "
            "as a save returned it"
        )
    run_id, segment, name = match.groups()
    return CheckpointPath(run_id, _KINDS[segment], name)


def check_name(name: Any) -> str:
    """Return the name of a new checkpoint."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UserError(
            f"path is {str(name)[:200]!r}: the name of a checkpoint has 1 to 128 letters, digits and _ . = + -, "
            "and begins with a letter, a digit or _"
        )
    return name


class CheckpointFiles:
    """Folders ``<root>/<run>/weights/<name>@<id>``, the same for the other kinds, ``<root>/<run>/ephemeral/<id>``, and
    ``<root>/<run>/live/<id>`` for what a restart needs.

    A published folder has a description next to it, ``<folder>.json``. Only folders without one are ever cleaned.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(root).resolve() / "checkpoints"
        self._root.mkdir(parents=True, exist_ok=True)

    def new_id(self) -> str:
        """Return the id of a new folder."""
        return uuid.uuid4().hex

    def folder(self, path: CheckpointPath, uid: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._inside(self._root / path.run_id / _SEGMENTS[path.kind] / f"{path.name}@{uid}")

    def ephemeral(self, run_id: str, uid: str) -> Path:
        """Return the folder of an ephemeral snapshot."""
        return self._inside(self._root / run_id / "ephemeral" / uid)

    def live(self, run_id: str, uid: str) -> Path:
        """Return the folder from which a live model is restored."""
        return self._inside(self._root / run_id / "live" / uid)

    def prepare(self, folder: Path) -> None:
        """Create the parents of a new folder."""
        folder.parent.mkdir(parents=True, exist_ok=True)

    def publish(self, folder: Path, description: dict[str, Any]) -> None:
        """Write the description of a folder whose row is stored next."""
        _description(folder).write_text(json.dumps(description, indent=2, default=str))

    def size(self, folder: Path) -> int:
        """Return the bytes of a folder's files."""
        return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())

    def unpublish(self, *folders: Path) -> None:
        """Delete the descriptions of folders, so that :meth:`clean` deletes them once no row names them."""
        for folder in folders:
            _description(folder).unlink(missing_ok=True)

    def remove(self, *folders: Path) -> None:
        """Delete folders and their descriptions. They may be missing."""
        self.unpublish(*folders)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def clean(self, known: Collection[Path]) -> list[Path]:
        """Delete folders that no row names and that were never published, such as those of an interrupted save."""
        orphans = []
        for folder in sorted(self._root.glob("*/*/*")):
            if folder in known or not folder.is_dir() or folder.is_symlink():
                continue
            # A published folder without a row means that the database is another one: keep it.
            if _description(folder).exists():
                logger.warning(
                    "%s is a checkpoint that the database does not know; delete it if it is not needed", folder
                )
                continue
            shutil.rmtree(folder, ignore_errors=True)
            orphans.append(folder)
        return orphans

    def _inside(self, folder: Path) -> Path:
        """Refuse a folder that leaves the root through a link."""
        if not folder.resolve().is_relative_to(self._root) or folder.is_symlink():
            raise UserError(f"the checkpoint {folder.name!r} leaves the root of checkpoints through a link")
        return folder


def _description(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")
