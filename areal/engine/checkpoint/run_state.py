"""State of a run in a checkpoint, other than tensors: version, schedule, random states, and objects of the user."""

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
    """Return the name of the file with a rank's random state."""
    return f"rng-{rank:05d}.pt"


def state_of(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states of named objects.

    Raises:
        ValueError: a state contains a value that cannot be loaded without executing code.
    """
    states = {name: value.state_dict() for name, value in stateful.items()}
    # Load each state once now: an error at the time of loading the checkpoint would be too late.
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
    """Serialize tensors, numbers, text and containers of them."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def from_bytes(content: bytes) -> Any:
    """Deserialize the result of :func:`to_bytes`, on the CPU.

    Raises:
        pickle.UnpicklingError: the content is not limited to tensors, numbers, text and containers of them.
    """
    # Libraries register more types with torch, process-wide. A checkpoint must be readable without importing them.
    registered = get_safe_globals()
    clear_safe_globals()
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    finally:
        add_safe_globals(registered)


def read_state(file: Path) -> Any:
    """Read a state file.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return from_bytes(file.read_bytes())
    # A damaged pickle may be any program: it fails in any way, also for lack of memory.
    except Exception as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
