"""Start a real vLLM server as a separate process group, and make the tiny models that it serves."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

import areal
from areal.api.weights import NamedTensor
from areal.tests.grid.models import FAMILIES, model_dir, tiny_model
from areal.weight_sync.apply import ModuleSource

PYTHON = Path(areal.__file__).parents[1] / ".venv-vllm" / "bin" / "python"
PORTS = range(8211, 8220)
START_SECONDS = 300.0
PLUGIN = Path(__file__).parents[1] / "harness" / "servers" / "vllm_plugin"
"""Folder of a plugin of vLLM with which its workers receive over gloo."""
STARTED = "Application startup complete"
"""Words of the log."""
CONTEXT = 512
"""Longest sequence of the server."""
VOCABULARY = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
"""Configuration of the model. It is not tied: on a CPU, vLLM keeps a tied output head of its start for ever."""

installed = pytest.mark.skipif(
    not PYTHON.exists() or "PYTEST_XDIST_WORKER" in os.environ,
    reason="needs the environment of `make test-vllm`, and a session without xdist: one server at a time",
)
marks = [pytest.mark.timeout(600), installed]
"""Marks of every module that needs the server."""


def served_model() -> str:
    """Return the directory of the model that servers start with."""
    return model_dir("qwen3", **SIZES)


def replica(seed: int | None = None) -> PreTrainedModel:
    """Return a model with the weights that servers start with, or with those of a seed."""
    if seed is None:
        return AutoModelForCausalLM.from_pretrained(served_model(), dtype="float32").eval()
    return tiny_model(FAMILIES["qwen3"](**SIZES), seed).eval()


def weights(seed: int) -> Iterator[NamedTensor]:
    """Yield the tensors of :func:`replica`."""
    return ModuleSource(replica(seed)).named_tensors()


def send(url: str, route: str, body: Any = None, method: str | None = None, key: str | None = None) -> tuple[int, Any]:
    """Send one request. Returns the status, and the body: parsed if it is JSON."""
    data = None if body is None and method != "POST" else json.dumps(body or {}).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + route, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    with contextlib.suppress(ValueError):
        return status, json.loads(text)
    return status, text


class VLLMProcess:
    """A vLLM server with float32 weights on the CPU. The process that asks for one waits until it answers.

    Args:
        model: directory of the model.
        scale_out: with ``/inference/v1/generate``, whose answers name the version of the weights of each token.
        lora: with adapters up to rank 8.
        development: with the routes for weights.
        processed: log-probs are those after temperature, ``top_p`` and ``top_k``.
        flags: further arguments of the command.
        environment: further variables of the process.
        port: ``None`` for the first free one of :data:`PORTS`.
    """

    kind, started, start_seconds = "vLLM", STARTED, START_SECONDS

    def __init__(
        self,
        model: str | None = None,
        *,
        scale_out: bool = True,
        lora: bool = True,
        development: bool = True,
        processed: bool = True,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.model = model or served_model()
        self.port, self._lock = free_port(PORTS if port is None else [port])
        self.folder = Path(tempfile.mkdtemp(prefix="vllm-"))  # short: it has sockets
        mode = "processed_logprobs" if processed else "raw_logprobs"
        command = [str(PYTHON), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        # With chunks of prompts, requests with a seed end the server: generators of the CPU do not have an offset.
        command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--no-enable-chunked-prefill"]
        command += ["--logprobs-mode", mode, *(["--enable-scale-out"] if scale_out else [])]
        command += [*(["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4"] if lora else []), *flags]
        self.command = command
        self.variables = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "TMPDIR": str(self.folder),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise each server uses the first core only
            "VLLM_SERVER_DEV_MODE": str(int(development)),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self.key = self.variables.get("VLLM_API_KEY")
        self._segments: set[Path] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Output of the server, over all starts."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, *, wait: bool = True) -> None:
        """Start the processes, with the weights of :attr:`model`."""
        self._starts = self.log.count(self.started) + 1
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.variables, stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: it ended, or does not answer in time.
        """
        end = time.monotonic() + self.start_seconds
        # Another server may answer on this port, while this one is about to find that it is taken.
        while not (self.log.count(self.started) == self._starts and self.healthy()):
            if self.process.poll() is not None or time.monotonic() > end:
                log = self.log
                self.close()
                raise RuntimeError(f"{self.kind} did not start:\n{log[-6000:]}")
            time.sleep(0.3)
        self._find_segments()

    def healthy(self) -> bool:
        """Return whether the server answers."""
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def call(self, route: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Send one request. Returns the status, and the body: parsed if it is JSON."""
        return send(self.url, route, body, method, self.key)

    def asked(self, route: str) -> int:
        """Return how many requests of a route the server has answered, by its log."""
        return sum(f'"POST {route} ' in line or f'"POST {route}?' in line for line in self.log.splitlines())

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = str(self.call("/metrics")[1]).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def ends(self, seconds: float) -> bool:
        """Wait for the server to end by itself. Returns False if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill all processes of the server at once, as the loss of its machine does."""
        self._find_segments()
        self._kill_group()

    def restart(self) -> None:
        """Start the server anew, with the weights of :attr:`model`."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the server, and remove what it leaves."""
        self._find_segments()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._kill_group()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _find_segments(self) -> None:
        """Note the shared memory of the group. A process that is killed leaves it."""
        for process in self._group():
            with contextlib.suppress(OSError, psutil.Error):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                self._segments |= {Path(line.split()[5]) for line in lines if "/dev/shm/psm_" in line}

    def _kill_group(self) -> None:
        group = self._group()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(group, 10)
        for segment in self._segments:
            segment.unlink(missing_ok=True)
        self._segments.clear()

    def _group(self) -> list[psutil.Process]:
        """Return the processes of the group that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getpgid(process.pid) == self.process.pid:
                    found.append(process)
        return found


def free_port(ports: Iterable[int]) -> tuple[int, IO[str]]:
    """Return a port that no other process uses or is about to use, and the locked file that says so."""
    for port in ports:
        lock = (Path(tempfile.gettempdir()) / f"vllm-port-{port}.lock").open("a")
        with socket.socket() as probe, contextlib.suppress(OSError):
            # The server listens half a minute after it was started.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port, lock
        lock.close()
    raise RuntimeError(f"no port of {ports} is free")
