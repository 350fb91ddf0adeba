"""SkyRL's Tinker server with our backend, in processes as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY = "tml-key-of-the-tests"


class SkyrlServer:
    """``python -m areal.integrations.skyrl`` in a process, which starts the engine process.

    Args:
        folder: for the database, the checkpoints and the log.
        model: directory of the base model with a tokenizer.
        sampler: sampler of the backend.
        options: further options of SkyRL.
    """

    def __init__(self, folder: Path, model: str, sampler: str | None = None, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        exact = {"dtype": "float32"}
        config = {"backend": "fsdp:d1", "backend_config": exact}
        if sampler is not None:
            config |= {"sampler": sampler, "sampler_config": exact}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.model, self.log = f"http://127.0.0.1:{port}", model, folder / "server.log"
        command = [sys.executable, "-m", "areal.integrations.skyrl", "--base-model", model]
        command += ["--backend-config", json.dumps(config), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--database-url", f"sqlite:///{folder / 'tinker.db'}"]
        command += ["--checkpoints-base", str(folder / "checkpoints"), *options]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            )

    @property
    def text(self) -> str:
        """Output of both processes."""
        return self.log.read_text()

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until the engine process is ready."""
        limit = time.monotonic() + seconds
        while "Starting background engine" not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < limit, self.text
            time.sleep(0.2)
        with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=30) as reply:
            assert json.load(reply) == {"status": "ok"}

    def stop(self) -> int:
        """End the server, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(folder: Path, model: str, sampler: str | None = None, *options: str) -> Iterator[SkyrlServer]:
    """Context in which a server runs."""
    server = SkyrlServer(folder, model, sampler, *options)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
