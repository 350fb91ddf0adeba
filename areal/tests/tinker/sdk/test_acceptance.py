"""The published SDK, unmodified, against ``areal serve``: every method, in each version."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from areal.cli import main
from areal.tests.harness.tiny import NEEDS_JAX
from areal.tests.tinker.api.stand_in import StandInService
from areal.tests.tinker.sdk.server import KEY, VERSIONS, ServerProcess, check_sdk, model_with_tokenizer


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


NEW, OLD = VERSIONS


def test_both_versions_use_a_server_at_the_same_time(server: ServerProcess) -> None:
    """And what an operator sees then. One test, because workers that share it would each start a server."""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(check_sdk, NEW, server, complete=True), pool.submit(check_sdk, OLD, server, complete=False)]
    for run in runs:
        run.result()
    # No request met an unexpected error, and the key is nowhere in the output.
    assert "Traceback" not in server.text
    assert KEY not in server.text
    check_monitoring(server)
    check_delays(server)


def test_old_version_completely(server: ServerProcess) -> None:
    check_sdk(OLD, server, complete=True)


@pytest.mark.parametrize("backend", ["megatron:d1", pytest.param("jax:d1", marks=NEEDS_JAX)])
def test_other_engines_give_the_same_numbers(backend: str, model: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server", model, backend=backend)
    try:
        check_sdk(NEW, server, complete=True)
        assert "Traceback" not in server.text
    finally:
        server.stop()


def check_monitoring(server: ServerProcess) -> None:
    """Health, metrics and state of a server that was used."""

    def get(path: str) -> str:
        request = urllib.request.Request(f"{server.url}{path}", headers={"X-API-Key": KEY})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()

    assert json.loads(get("/api/v1/healthz")) == {"status": "ok"}
    assert "areal_healthy 1.0" in get("/metrics")
    # The page and the metrics read the same fields in the tests of the HTTP layer.
    status, expected = json.loads(get("/status")), asyncio.run(StandInService().status())
    assert set(expected) <= set(status)
    assert set(expected["queue"]) <= set(status["queue"])
    for name in ("models", "checkpoints", "requests"):
        assert all(set(expected[name][0]) <= set(entry) for entry in status[name]), name


def check_delays(server: ServerProcess) -> None:
    """An answer in two packets waits 40 ms for the first one's acknowledgement if the socket collects small packets."""
    seconds = []
    with httpx2.Client(base_url=server.url, headers={"X-API-Key": KEY}) as client:
        for _ in range(20):
            start = time.perf_counter()
            assert client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"}).status_code == 200
            seconds.append(time.perf_counter() - start)
    assert min(seconds[1:]) < 0.03


# ---- the command


def areal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the console script in this process, and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["areal", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(monkeypatch, "--help") == 0
    assert "serve" in capsys.readouterr().out
    assert areal(monkeypatch, "serve", "--help") == 0
    assert "--api-key-file" in capsys.readouterr().out


def test_wrong_options_are_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("secret-of-mine\n")
    for options, message in (
        (("--api-key-file", str(tmp_path / "keys")), "tml-"),
        (("--backend-config", "[1]"), "backend_config"),
        (("--backend", "other:d1", "--port", "0"), "installed are"),
    ):
        status = areal(monkeypatch, "serve", "--model", str(tmp_path), *options)
        assert message in str(status)
        assert "secret-of-mine" not in str(status)
