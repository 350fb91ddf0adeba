"""The published SDK, unmodified, against ``areal serve``: every method, in each version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.tests.tinker.sdk.server import KEY, VERSIONS, Sdk, ServerProcess, model_with_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer."""
    return model_with_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the tests of this module."""
    process = ServerProcess(tmp_path_factory.mktemp("server"), model)
    yield process
    assert process.stop() == 0, process.text


CURVE = [-72.02117, -61.43531, -60.98556, -65.69525, -62.1725, -68.56596, -64.19545, -55.52173, -69.4694, -61.35426]
"""Sums of log-probs in ten steps of ``training.py``. The same with every version, and in the protobuf and the JSON form."""


@pytest.mark.parametrize("version", VERSIONS)
def test_sdk(version: str, server: ServerProcess) -> None:
    sdk = Sdk(version)
    assert sdk.run(server, "training")["curve"] == pytest.approx(CURVE, abs=1e-3)
    assert len(sdk.run(server, "sampling")["tokens"]) == 8
    # No request met an unexpected error, and the key is nowhere in the output.
    assert "Traceback" not in server.text
    assert KEY not in server.text


def test_monitoring_of_a_server_in_use(server: ServerProcess) -> None:
    def get(path: str) -> str:
        request = urllib.request.Request(f"{server.url}{path}", headers={"X-API-Key": KEY})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()

    assert json.loads(get("/api/v1/healthz")) == {"status": "ok"}
    assert "areal_healthy 1.0" in get("/metrics")
    assert {"models", "queue", "losses", "checkpoints"} <= set(json.loads(get("/status")))


# ---- the command


def areal(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    command = [sys.executable, "-m", "areal.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_help_lists_the_commands() -> None:
    shown = areal("--help")
    assert shown.returncode == 0
    assert "serve" in shown.stdout
    assert "--api-key-file" in areal("serve", "--help").stdout


def test_wrong_options_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret-of-mine\n")
    for options, message in (
        (("--api-key-file", str(tmp_path / "keys")), "tml-"),
        (("--backend-config", "[1]"), "backend_config"),
    ):
        refused = areal("serve", "--model", str(tmp_path), *options)
        assert refused.returncode == 1
        assert message in refused.stderr
        assert "secret-of-mine" not in refused.stderr + refused.stdout
        assert "Traceback" not in refused.stderr
