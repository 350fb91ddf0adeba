"""Transports and receivers of weights, in other processes too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from areal.api import WeightReceiver
from areal.engine.checkpoint.async_save import Observe
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import wait_until
from areal.tests.harness.pool import PRELOADED
from areal.utils.distributed import ControlPlane, init_default_group
from areal.weight_sync import (
    BroadcastReceiver,
    BroadcastTransport,
    SharedMemoryReceiver,
    SharedMemoryTransport,
)
from areal.weight_sync.transport import Transport

BUCKET = 5_000


def filled(value: float, family: str = "qwen3") -> nn.Module:
    """Return a tiny model whose weights are all one number."""
    made = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def number(module: nn.Module) -> float:
    """Return the number that all weights are equal to."""
    values = {float(value) for parameter in module.parameters() for value in parameter.unique()}
    assert len(values) == 1, f"a mix of {sorted(values)}"
    return values.pop()


@contextmanager
def alone() -> Iterator[ControlPlane]:
    """Return the control plane of a trainer with one rank."""
    had_group = dist.is_initialized()
    init_default_group()
    yield ControlPlane()
    if not had_group:
        dist.destroy_process_group()


@pytest.fixture
def control() -> Iterator[ControlPlane]:
    with alone() as made:
        yield made


@pytest.fixture
def socket_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with a short path, for sockets."""
    folder = Path(f"/tmp/areal-ws-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir(mode=0o700)
    yield folder
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()


def transport_to(way: str, socket_dir: Path, control: ControlPlane, **options: Any) -> Transport:
    options = {"bucket_bytes": BUCKET, "timeout": 30.0, **options}
    if way == "ipc":
        return SharedMemoryTransport(control, socket_dir / "socket", **options)
    made = BroadcastTransport(control, **options)
    assert made.address is not None
    (socket_dir / "partial").write_text(str(made.address[1]))
    (socket_dir / "partial").rename(socket_dir / "port")
    return made


def receiver_of(way: str, socket_dir: Path, module: nn.Module, **options: Any) -> WeightReceiver:
    options = {"timeout": 30.0, **options}
    if way == "ipc":
        return SharedMemoryReceiver(socket_dir / "socket", module, **options)
    wait_for(socket_dir / "port")
    return BroadcastReceiver(("127.0.0.1", int((socket_dir / "port").read_text())), module, **options)


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"{path} exists", 120)


def start(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def ended(process: multiprocessing.process.BaseProcess) -> int | None:
    process.join(60)
    code = process.exitcode
    process.kill()
    return code


def dying(stage: str, armed: list[bool]) -> Observe:
    def die(reached: str) -> None:
        if armed and reached == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def receiving(receiver: WeightReceiver) -> tuple[threading.Thread, list[Any]]:
    """Receive once in a thread. Returns the outcome."""
    came: list[Any] = []

    def receive() -> None:
        try:
            came.append(receiver.receive(30.0))
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread, came
