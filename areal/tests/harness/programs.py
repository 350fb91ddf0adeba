"""Compiled programs of JAX in the tests: cheap to compile, and kept on disk for all processes and for the next run."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA optimizes little, unless ``XLA_FLAGS`` is set: most of the time of a test of the JAX engine is compilation."""


def share_programs(directory: Path) -> None:
    """Keep the compiled programs of JAX in a directory, for this process and for those that it starts."""
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        if "jax" in sys.modules:
            sys.modules["jax"].config.update(name, value)


def write_programs_on_this_rank() -> None:
    """Let JAX write programs to disk on every rank. It does on rank 0 only, and on CPUs the names of programs differ by rank."""
    if "jax" not in sys.modules:
        return
    compiler: Any = importlib.import_module("jax._src.compiler")
    write = compiler._cache_write

    def write_as_rank_0(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(compiler, "distributed", _OfRank0(compiler.distributed)):
            write(*args, **kwargs)

    compiler._cache_write = write_as_rank_0


class _OfRank0:
    """The module ``distributed`` of JAX, or its state, with the process id 0."""

    process_id = 0

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return _OfRank0(value) if name == "global_state" else value
