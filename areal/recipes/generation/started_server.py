"""An inference server that a run starts and stops."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from areal.recipes.generation import keeper

_OPTIONS = {
    "vllm": ("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
    "sglang": (),
}
"""Options with which a server of a kind must be started."""
_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
"""Environment variables with which vLLM must be started."""
_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
"""Variable of vLLM's own mode of batch invariance."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine, of which a proxy for downloads knows nothing."""
_SHOWN = 3000
"""Characters of the log in an error."""


class StartedServer:
    """A server on this machine. It ends with the context, and with this process, also if that is killed.

    Args:
        command: command with options, such as ``vllm serve --max-model-len 4096``. Gets the model, ``--host``, ``--port``, and the options that
            the rollout needs.
        model: directory or hub name.
        kind: ``"vllm"`` or ``"sglang"``.
        log: file of its output.
        flags: further options, which the run needs.
        start_seconds: time limit until it answers.
        batch_invariant: start vLLM in its own mode of batch invariance.

    Attributes:
        url: its address.
    """

    def __init__(
        self,
        command: str,
        model: str,
        kind: str,
        log: Path,
        *,
        flags: Sequence[str] = (),
        start_seconds: float = 600.0,
        batch_invariant: bool = False,
    ) -> None:
        self._log, self._start_seconds = log, start_seconds
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        named = ("--model-path", model) if kind == "sglang" else (model,)
        options = ("--host", "127.0.0.1", "--port", str(port), *_OPTIONS[kind], *flags)
        self._command = [*shlex.split(command), *named, *options]
        self._variables = {**_VARIABLES, **(_INVARIANT if batch_invariant else {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the server, and wait until it answers.

        Raises:
            ValueError: it ended, or does not answer in time; the message has the end of its output.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            variables = [f"{name}={value}" for name, value in self._variables.items()]
            kept = [sys.executable, "-I", "-S", str(keeper.__file__), "env", *variables, *self._command]
            # A session of its own: a signal that ends the group of this process must not end the keeper before the server.
            self._process = subprocess.Popen(
                kept, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + self._start_seconds
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > end:
                self._end()
                why = "ended" if ended else f"did not answer within {self._start_seconds:g} s"
                output = self._log.read_text(errors="replace")[-_SHOWN:]
                raise ValueError(f"start_server: {shlex.join(self._command)} {why}; the end of {self._log}:\n{output}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False
