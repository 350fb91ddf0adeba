"""The other project that is published as areal: its files next to ours, and its metadata somewhere on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal.tests.unit.install.environments import copy_package, install_other, run_isolated

IMPORT = "import sys; sys.path[:0] = sys.argv[1:]; import areal; print('done')"


def run_import(*paths: Path) -> tuple[str, str]:
    done = run_isolated([sys.executable, "-I", "-S", "-c", IMPORT, *paths], paths[0])
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("left", ["all", "areal/api/cli_args.py", "areal/infra/__init__.py"])
def test_files_of_both_in_one_folder_are_refused(left: str, tmp_path: Path) -> None:
    """Also where only a part of the other project is left."""
    copy_package(tmp_path)
    install_other(tmp_path, over=False)
    if left != "all":
        for name in ("areal/api/cli_args.py", "areal/infra/__init__.py"):
            if name != left:
                (tmp_path / name).unlink()
    out, error = run_import(tmp_path)
    assert out == ""
    assert "NameClashError" in error
    assert str(tmp_path / "areal") in error
    assert "AReaL" in error
    assert "pip uninstall areal" in error


def test_other_installation_elsewhere_warns_once(tmp_path: Path) -> None:
    """This package comes first on the path and works. Parts of the other one cannot be imported."""
    copy_package(tmp_path / "ours")
    install_other(tmp_path / "theirs", over=True)
    out, error = run_import(tmp_path / "ours", tmp_path / "theirs")
    assert out == "done", error
    assert error.count("UserWarning") == 1
    assert str(tmp_path / "theirs" / "areal-1.0.4.dist-info") in error
    assert str(tmp_path / "ours" / "areal") in error
    assert "pip uninstall areal" in error


def test_own_metadata_is_no_clash(tmp_path: Path) -> None:
    copy_package(tmp_path)
    info = tmp_path / "areal-0.2.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("areal/__init__.py,,\nareal/api/config.py,,\n")
    (tmp_path / "areal-0.1.0.dist-info").mkdir()  # left by an interrupted uninstallation
    assert run_import(tmp_path) == ("done", "")
