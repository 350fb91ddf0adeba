"""Detection of the other project that is published under the name ``areal``: AReaL, a system for asynchronous reinforcement learning.

Both packages are imported as ``areal`` and have folders of the same names, so an environment can contain one of them only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence

MARKERS = (("infra", "__init__.py"), ("api", "cli_args.py"))
"""Files of AReaL's package that this one does not have. One of them is in every release."""

_THEIR_RECORD = "areal/api/cli_args.py,"

WAY_OUT = (
    "Both projects are called areal. Use one virtual environment for each, or remove AReaL: run 'pip uninstall areal' until pip finds "
    "none, delete the folder if it still exists, and install this package again"
)


class NameClashError(ImportError):
    """The folder of this package also contains files of AReaL."""


def other_metadata(paths: Sequence[str]) -> Iterator[str]:
    """Yield the metadata directories of installed releases of AReaL.

    Args:
        paths: folders to look in, as in ``sys.path``. Costs one listing of each.
    """
    for folder in paths:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:  # a zip archive, or a folder that does not exist
            continue
        for name in names:
            if name.lower().startswith("areal-") and name.endswith(".dist-info"):
                path = os.path.join(folder, name)
                if _is_other(path):
                    yield path


def check_name_clash(folder: str, paths: Sequence[str]) -> None:
    """Raise if files of AReaL are in the folder of this package, and warn if AReaL is installed elsewhere.

    Args:
        folder: folder of this package.
        paths: as for :func:`other_metadata`.
    """
    mixed = [os.path.join(folder, *marker) for marker in MARKERS if os.path.exists(os.path.join(folder, *marker))]
    if mixed:
        raise NameClashError(
            f"{folder} contains files of two projects: areal, a library of train engines, and AReaL, a system for reinforcement learning "
            f"({mixed[0]}). Each has overwritten files of the other. {WAY_OUT}."
        )
    for metadata in other_metadata(paths):
        warnings.warn(
            f"import areal: this is areal, a library of train engines, from {folder}; AReaL, another project with the same import name, "
            f"is installed too ({metadata}) and cannot be imported. {WAY_OUT}.",
            stacklevel=3,
        )


def _is_other(metadata: str) -> bool:
    try:
        with open(os.path.join(metadata, "RECORD"), encoding="utf-8") as record:
            return any(line.startswith(_THEIR_RECORD) for line in record)
    except OSError:
        return False
