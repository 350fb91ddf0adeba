"""``areal serve`` with ranks in Ray, of which one is killed while the published SDK has requests on their way."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from areal.tests.tinker.sdk.server import KEY, VERSIONS, Sdk, ServerProcess, model_with_tokenizer


def ranks(server: ServerProcess) -> list[int]:
    """Return the processes of ranks below a server. Ray gives them the name of the actor."""
    parents, found = {}, []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if (process / "cmdline").read_bytes().startswith(b"ray::RankProcess"):
                found.append(int(process.name))

    def below(process: int) -> bool:
        return process == server.process.pid or (process in parents and below(parents[process]))

    return sorted(filter(below, found))


def health(server: ServerProcess) -> int:
    """Return the status of the health check."""
    request = urllib.request.Request(f"{server.url}/api/v1/healthz", headers={"X-API-Key": KEY})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.timeout(400)
def test_clients_go_on_after_the_loss_of_a_rank(apart: dict[str, str], tmp_path: Path) -> None:
    sdk = Sdk(VERSIONS[0])
    model = model_with_tokenizer(tmp_path / "model")
    ray = {"environment": {"OMP_NUM_THREADS": "1"}, "hang_seconds": 60.0}
    server = ServerProcess(tmp_path / "server", model, backend="fsdp:d2", settings={"ray": ray}, environment=apart)
    client = None
    try:
        assert health(server) == 200
        before = ranks(server)
        assert len(before) == 2
        client = sdk.start(server, "rank_loss")
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n", client.communicate("\n", timeout=60)
        os.kill(before[1], signal.SIGKILL)
        # The health shows the loss, and that the same server has new ranks.
        for status in (503, 200):
            end = time.monotonic() + 120
            while health(server) != status and time.monotonic() < end:
                time.sleep(0.02)
            assert health(server) == status, server.text
        assert sdk.finish(client, server, "\n") == {"done": True}
        assert server.process.poll() is None
        after = ranks(server)
        assert len(after) == 2
        assert not set(after) & set(before)
    finally:
        if client is not None:
            client.kill()
        server.stop()
