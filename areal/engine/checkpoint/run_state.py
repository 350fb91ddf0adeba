"""What a checkpoint keeps of a run beside its tensors: version, schedule, random states, and what the user adds."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from areal.api.checkpoint import Stateful

STATE_FILE = "state.pt"


def rng_file(rank: int) -> str:
    """Where a rank's random state is kept."""
    return f"rng-{rank:05d}.pt"


def state_of(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of named objects.

    Raises:
        ValueError: one holds something that can not be read again without running code.
    """
    states = {name: thing.state_dict() for name, thing in stateful.items()}
    for name, content in states.items():
        try:
            from_bytes(to_bytes(content))
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"SaveLoadMeta.stateful[{name!r}].state_dict() holds something that is not a tensor, a number, text or a container "
                f"of them: {error}"
            ) from error
    return states


def to_bytes(content: Any) -> bytes:
    """Tensors, numbers, text and containers of them, as a file holds them."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def from_bytes(content: bytes) -> Any:
    """What :func:`to_bytes` was given, on the CPU.

    Raises:
        pickle.UnpicklingError: it holds more than tensors, numbers, text and containers of them.
    """
    # Libraries widen what torch accepts for the whole process; a checkpoint must be readable where they are not imported.
    widened = get_safe_globals()
    clear_safe_globals()
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    finally:
        add_safe_globals(widened)


def read_state(file: Path) -> Any:
    """The content of a state file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return from_bytes(file.read_bytes())
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
