"""A server that is killed, and what the next one must have."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from areal.tests.unit.tinker.service.fakes import (
    LOCAL,
    FakeSampling,
    FakeTraining,
    digest,
    done,
    eventually,
    outcome,
    sample,
    serving,
    settings,
    train,
)
from areal.tinker.service.service import Service
from areal.tinker.service.tenants.caller_service import CallerService
from areal.tinker.service.verbs.models import CreateFromCheckpoint


def start(root: Path, url: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "areal.tests.unit.tinker.service.crash_server", str(root), *([url] if url else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(server: subprocess.Popen[str], lines: int) -> dict[str, list[list[str]]]:
    """Read so many acknowledged steps, kill the server at once, and return all that it acknowledged by kind."""
    assert server.stdout is not None
    read = [server.stdout.readline() for _ in range(lines)]
    assert all(read), "the server ended by itself"
    server.send_signal(signal.SIGKILL)
    read += server.stdout.readlines()
    server.wait()
    told: dict[str, list[list[str]]] = {}
    for line in read:
        kind, *words = line.split()
        told.setdefault(kind, []).append(words)
    return told


async def check_after_crash(root: Path, told: dict[str, list[list[str]]], url: str | None = None) -> None:
    """Start the next server, and look for everything that the killed one acknowledged."""
    async with serving(root, training := FakeTraining(), FakeSampling(), database_url=url, lease_s=1.0) as service:
        (session,), (model,) = told["session"][0], told["model"][0]
        # Results that were acknowledged can be read again.
        for (request_id,) in told.get("done", []):
            assert (await service.retrieve(request_id, 0)).result["type"] == "optim_step"
        # Every published checkpoint is there and can be used.
        paths = [path for (path,) in told.get("saved", [])]
        published = [c["tinker_path"] for c in (await service.all_checkpoints())["checkpoints"]]
        assert set(published) >= set(paths)
        for number, path in enumerate(paths, 1):
            assert (await service.checkpoint_folder(path) / "state.json").exists()
            if "/weights/" in path:
                await done(service, CreateFromCheckpoint(session, number, digest(path), path=path, optimizer=True))
        # The model goes on with its unfinished requests. One of them waits for a number that the client has not sent.
        live = service.parts.training.order.models[model]
        await eventually(lambda: live.head() is None and not live.busy)
        await done(service, train(model, live.next_seq))
        for (request_id,) in told.get("training", []):
            assert (await service.retrieve(request_id, 10)).state == "done"
        assert training.models[model]["steps"] >= len(told.get("done", []))
        assert not (await service.training_run(model))["corrupted"]
        # Unfinished sampling is sent again by the client.
        for request_id, name in told.get("sampling", []):
            assert (await service.retrieve(request_id, 0)).state == "gone"
            again = await service.submit(sample(name, 1))
            assert again.request_id == request_id
            assert (await outcome(service, again)).state == "done"


@contextlib.asynccontextmanager
async def killed(root: Path, training: FakeTraining, **changes: Any) -> AsyncIterator[CallerService]:
    """A server that is killed at the end: nothing of it runs after that, and nothing is stored."""
    service = Service(training, None, settings(root, **changes))
    await service.start()
    try:
        yield service.for_caller(LOCAL)
    finally:
        training.gate.set()
        # Its lease counts as that of another server, which stops all writes, and is then free.
        engine = create_engine(f"sqlite:///{root}/tinker.db")
        with engine.begin() as connection:
            connection.execute(text("UPDATE lease SET owner = 'killed', expires = 0"))
        engine.dispose()
        service._parts.training.halt()
        await service.stop()


class Deadly(FakeTraining):
    """A backend whose server is killed during a pass that begins with the token 9.

    Attributes:
        together: number of requests in that pass. 0 before it begins.
    """

    together = 0

    def forward_backward(self, batches: Any) -> list[Any]:
        if any(batch.data[0].input_ids[0] == 9 for batch in batches):
            self.gate.clear()
            self.together = len(batches)
        return super().forward_backward(batches)
