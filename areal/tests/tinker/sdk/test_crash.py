"""A client of the SDK whose server is killed and started again on the same files."""

from __future__ import annotations

import signal
from pathlib import Path

from areal.tests.tinker.sdk.server import VERSIONS, Sdk, ServerProcess, model_with_tokenizer


def test_client_goes_on_after_a_kill_of_the_server(tmp_path: Path) -> None:
    sdk = Sdk(VERSIONS[0])
    model = model_with_tokenizer(tmp_path / "model")
    first = ServerProcess(tmp_path / "server", model)
    client = sdk.start(first, "crash")
    second = None
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n", client.communicate("\n", timeout=60)
        first.stop(signal.SIGKILL)
        second = ServerProcess(tmp_path / "server", model, port=first.port)
        assert sdk.finish(client, second, "\n") == {"done": True}
        # While it serves, another server on the same files refuses to start, and names it.
        third = ServerProcess(tmp_path / "server", model)
        assert third.process.wait(120) == 1
        assert f"process {second.process.pid}" in third.text, third.text
        assert "Traceback" not in third.text
    finally:
        client.kill()
        for server in filter(None, (first, second)):
            server.stop()
