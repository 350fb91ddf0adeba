"""Start a real SGLang server as a separate process group, on the CPU, with the tiny model of the tests of vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import areal
from areal.tests.vllm.server import CONTEXT, VLLMProcess, free_port, served_model

PYTHON = Path(areal.__file__).parents[1] / ".venv-sglang" / "bin" / "python"
LAUNCH = Path(__file__).parent / "on_cpu" / "launch.py"
"""Start of the server with a stub of its compiled kernels."""
PORTS = range(8221, 8230)

installed = pytest.mark.skipif(
    not PYTHON.exists() or "PYTEST_XDIST_WORKER" in os.environ,
    reason="needs the environment of `make test-sglang`, and a session without xdist: one server at a time",
)
marks = [pytest.mark.timeout(1800), installed]
"""Marks of every module that needs the server."""


class SGLangProcess(VLLMProcess):
    """An SGLang server with float32 weights. The process that asks for one waits until it answers.

    It respects seeds, and takes adapters up to rank 8.

    Args:
        model: directory of the model.
        flags: further arguments of the command.
    """

    kind, started, start_seconds = "SGLang", "The server is fired up and ready to roll!", 1200.0

    def __init__(self, model: str | None = None, *, flags: Sequence[str] = ()) -> None:
        self.model, self.key = model or served_model(), None
        self.port, self._lock = free_port(PORTS)
        self.folder = Path(tempfile.mkdtemp(prefix="sglang-"))
        command = [str(PYTHON), "-W", "ignore", str(LAUNCH), "--model-path", self.model, "--skip-tokenizer-init"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "float32"]
        command += ["--attention-backend", "torch_native", "--enable-deterministic-inference", "--enable-metrics"]
        # A fraction of the memory that happens to be free, and of it only what these tokens need.
        command += ["--mem-fraction-static", "0.9", "--max-total-tokens", "40000", "--max-running-requests", "64"]
        command += [
            "--context-length",
            str(CONTEXT),
            "--enable-lora",
            "--max-lora-rank",
            "8",
            "--max-loras-per-batch",
            "4",
        ]
        self.command = [*command, "--lora-target-modules", "all", "--lora-backend", "torch_native", *flags]
        self.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "TMPDIR": str(self.folder),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes a minute
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._segments: set[Path] = set()
        self.start()
