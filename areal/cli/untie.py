"""``areal untie``: write a copy of a model whose embedding and head are separate weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal.engine.model.untied_copy import write_untied_copy


def run_untie(options: list[str]) -> int:
    """Run ``areal untie``. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="areal untie",
        description="Write a copy of a model with tied embeddings in which embedding and head are separate weights: "
        "into it, an adapter of the head can be merged.",
    )
    parser.add_argument("model", help="directory or hub name of the model")
    parser.add_argument("folder", type=Path, help="new directory of the copy")
    given = parser.parse_args(options)
    try:
        write_untied_copy(given.model, given.folder)
    except (OSError, ValueError) as error:
        sys.exit(f"areal untie: {error}")
    print(given.folder)
    return 0
