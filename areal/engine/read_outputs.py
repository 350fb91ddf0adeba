"""An error for outputs that a loss reads, and that the call did not name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from areal.api.batch import TokenOutputs

_FIELDS = tuple(field.name for field in fields(TokenOutputs))


class ReadOutputs(TokenOutputs):
    """Token outputs that record which missing outputs are read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in _FIELDS:
            self.missing().append(name)
        return value

    def missing(self) -> list[str]:
        """Return the names of the missing outputs that were read, in order."""
        # In the instance's dict, because the dataclass is frozen.
        return vars(self).setdefault("_missing", [])


@contextmanager
def naming_missing_outputs(outputs: ReadOutputs) -> Iterator[None]:
    """Convert an error of arithmetic with a missing output inside to one that names the output.

    Raises:
        ValueError: the loss computed with an output that the call did not name.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error) or not outputs.missing():
            raise
        # Named as the caller writes them: a TopK for "topk".
        read = outputs.missing()
        names = [name for name in _FIELDS if vars(outputs)[name] is not None or name in read]
        written = ", ".join("TopK(k)" if name == "topk" else repr(name) for name in names)
        raise ValueError(
            f"loss_fn read the output {read[-1]!r}, which this call does not compute: pass outputs=({written})"
        ) from error
