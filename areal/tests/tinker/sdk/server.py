"""A server process on a tiny model, and scripts that run with a version of the SDK."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import areal
from areal.tests.grid.models import VOCAB, model_dir

ROOT = Path(areal.__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
VERSIONS = ("0.38.0", "0.24.1")
KEY = "tml-key-of-the-tests"
CURVE = [-72.02117, -61.43531, -60.98556, -65.69525, -62.1725, -68.56596, -64.19545, -55.52173, -69.4694, -61.35426]
"""Sums of log-probs in ten steps of ``training.py``. The same with every version, and in the protobuf and the JSON form."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of ASCII characters, with the ids of the tiny models' special tokens."""
    letters = sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii())
    names = ["<s>", "</s>", "<pad>", *letters][:VOCAB]
    names += [f"<{number}>" for number in range(len(names), VOCAB)]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def model_with_tokenizer(folder: Path, family: str = "qwen3") -> str:
    """Write a tiny model with a tokenizer to a folder, and return it."""
    shutil.copytree(model_dir(family), folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


class ServerProcess:
    """``areal serve`` in a process, which names its model ``name``. ``url`` is its address.

    Args:
        settings: those of the backend, in addition to float32.
        threads: threads of a product on the CPU.
        environment: variables of the process; by default those of the tests.
        options: further options of the command.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        port: int = 0,
        *,
        name: str = "tiny",
        backend: str = "fsdp:d1",
        threads: int = 1,
        settings: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "keys").write_text(f"tml-another-key-0000\n{KEY}\n")
        exact = {"dtype": "float32"}
        command = [sys.executable, "-m", "areal.cli", "serve", "--model", model, "--backend", backend]
        command += [
            "--backend-config",
            json.dumps({**exact, **(settings or {})}),
            "--sampler-config",
            json.dumps(exact),
        ]
        command += ["--root", str(folder / "root")]
        command += [*options, "--name", name, "--api-key-file", str(folder / "keys"), "--port", str(port)]
        self.log: list[str] = []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        variables = {**(environment or os.environ), "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, **pipes, text=True, env=variables)
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if "TINKER_BASE_URL" in line:
                self._ready.set()
        self._ready.set()

    @property
    def text(self) -> str:
        """Output of the process."""
        return "".join(self.log)

    @property
    def url(self) -> str:
        """Address of the server, once it is there."""
        assert self._ready.wait(120), self.text
        found = re.search(r"TINKER_BASE_URL\s+(\S+)", self.text)
        assert found, self.text
        return found[1]

    @property
    def port(self) -> int:
        """Port of the server."""
        return int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


class Sdk:
    """A version of the SDK in its environment, which holds no torch: a script that needs torch finds it at the end of its path."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.python = ROOT / f".venv-tinker-{version}" / "bin" / "python"
        if not self.python.exists():
            pytest.skip(f"{self.python} is missing: `make {self.python.parents[1].name}/.ready` installs the SDK")

    def start(self, server: ServerProcess, script: str, **arguments: Any) -> subprocess.Popen[str]:
        """Start a script."""
        packages = str(Path(torch.__file__).parents[1])
        given = {"version": self.version, "packages": packages, **arguments}
        # The environment of the tests is not the script's.
        changes = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [str(self.python), "-X", "faulthandler", "-W", "ignore", str(SCRIPTS / f"{script}.py"), json.dumps(given)],
            **{"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "env": {**os.environ, **changes}},
        )

    def run(self, server: ServerProcess, script: str, **arguments: Any) -> dict[str, Any]:
        """Run a script, whose last line of output is JSON."""
        return self.finish(self.start(server, script, **arguments), server)

    def finish(self, process: subprocess.Popen[str], server: ServerProcess, text: str = "") -> dict[str, Any]:
        """Send input to a script, wait for its end, and return its last line."""
        try:
            output, errors = process.communicate(text, timeout=150)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        assert process.returncode == 0, f"{output[-4000:]}\n{errors[-6000:]}\n{server.text[-6000:]}"
        return json.loads(output.splitlines()[-1])


def check_sdk(version: str, server: ServerProcess, *, complete: bool) -> None:
    """Run the acceptance script. What needs torch or a tokenizer in the client, which takes seconds to import, is left out unless complete."""
    results = Sdk(version).run(server, "acceptance", complete=complete)
    assert results["curve"] == pytest.approx(CURVE, abs=1e-3)
    assert len(results["tokens"]) == 8
