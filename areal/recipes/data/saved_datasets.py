"""Data sets that need the package datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk


def read_parquet(path: Path) -> Any:
    """Return the rows of a Parquet file."""
    return Dataset.from_parquet(str(path))


def read_directory(path: Path) -> Any:
    """Return what ``save_to_disk`` wrote: a data set, or several by the names of their splits."""
    return load_from_disk(str(path))
