"""Compiled programs of JAX in the tests: cheap to compile, and kept on disk for all processes and for the next run."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

FLAGS = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    )
)
"""XLA optimizes little, unless ``XLA_FLAGS`` is set: most of the time of a test of the JAX engine is compilation.

Of JAX 0.10.2. A later release that has dropped one of them ends the process and names it.
"""

WAIT = 60.0
"""Seconds that a rank waits for a program which the first rank compiles. Then it compiles the program itself."""


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


def compile_once_in_a_world() -> None:
    """Let JAX compile a program of several ranks on the first of them only, and write those of one rank on that rank.

    JAX writes on rank 0 only, and on CPUs the names of programs differ by rank, so that every rank would compile all of them.
    """
    if "jax" not in sys.modules:
        return
    importlib.import_module("jax._src.cache_key")._hash_accelerator_config = lambda *_: None
    compiler: Any = importlib.import_module("jax._src.compiler")
    compile_here, write = compiler._compile_and_write_cache, compiler._cache_write

    def compile_or_wait(backend: Any, program: Any, devices: Any, options: Any, callbacks: Any, *names: str) -> Any:
        ranks = {device.process_index for device in devices}
        deadline = time.monotonic() + WAIT
        while not callbacks and jax_rank() > min(ranks) and time.monotonic() < deadline:
            executable, _ = compiler._cache_read(*names, options, backend, devices)
            if executable is not None:
                return executable
            time.sleep(0.01)
        return compile_here(backend, program, devices, options, callbacks, *names)

    def jax_rank() -> int:
        return compiler.distributed.global_state.process_id

    def write_as_rank_0(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(compiler, "distributed", _OfRank0(compiler.distributed)):
            write(*args, **kwargs)

    compiler._compile_and_write_cache, compiler._cache_write = compile_or_wait, write_as_rank_0


class _OfRank0:
    """The module ``distributed`` of JAX, or its state, with the process id 0."""

    process_id = 0

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return _OfRank0(value) if name == "global_state" else value
