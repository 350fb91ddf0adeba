"""Number of files that a reader has to open to follow one call: the second one, since the first builds what is built once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import areal
from areal.api import FinetuneSpec, OptimizerConfig, TrainEngineConfig
from areal.engine.registry import create_engine
from areal.inference import VLLM, HTTPRollout
from areal.tests.grid.models import model_dir
from areal.tests.harness.servers.rollout_http import PROMPT, Process
from areal.tests.harness.tiny import global_batch
from areal.tests.harness.world import one_rank
from areal.tests.tinker.api.bodies import cross_entropy_json
from areal.tests.tinker.api.stand_in import client_of
from areal.tests.unit.inference.local.rollouts import endless
from areal.tests.unit.tinker.service.fakes import new_model, serving
from areal.tinker.backends.training.engine_backend import create
from areal.trainer.losses import sft_objective

ROOT = str(Path(areal.__file__).parent) + "/"
FACTORIES = "engine/megatron/cpu.py"
"""Wraps functions of torch in a process that has imported Megatron-Core for another test: no part of the calls here."""
ANONYMOUS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Walk:
    """Functions of the library that are called on this thread, and on threads that have started under :func:`walking`.

    Attributes:
        on: record calls.
        files: files entered, relative to the package.
    """

    def __init__(self) -> None:
        self.on, self.files = False, set[str]()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call: the profile function of a thread."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in ANONYMOUS:
            file = code.co_filename.removeprefix(ROOT)
            if not file.startswith("tests/") and file != FACTORIES:
                self.files.add(file)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls inside."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


@contextmanager
def walking() -> Iterator[Walk]:
    """Yield a walk over the calls of this thread, and of threads that start inside."""
    walk = Walk()
    sys.setprofile(walk.note)
    threading.setprofile(walk.note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def check(walk: Walk, budget: int) -> None:
    """Check that a call enters few files."""
    files = "\n".join(sorted(walk.files))
    assert 3 < len(walk.files) <= budget, f"{len(walk.files)} files, and {budget} are allowed:\n{files}"


def test_training_step() -> None:
    config = TrainEngineConfig(path=model_dir("qwen3"), dtype="float32", optimizer=OptimizerConfig())
    with walking() as walk, create_engine(config) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=10))
        engine.train_batch(global_batch(), sft_objective())
        with walk.recording():
            engine.train_batch(global_batch(), sft_objective())
    check(walk, 50)


def test_forward_backward_over_http(tmp_path: Path) -> None:
    found: list[set[str]] = []

    async def main() -> None:
        backend = create(model_dir("qwen3"), "fsdp:d1", {"dtype": "float32"})
        try:
            async with serving(tmp_path, backend) as service, client_of(service) as client:
                model = await new_model(service)
                for seq in range(1, 9):
                    walk.on = seq > 1
                    body = cross_entropy_json(model_id=model, seq_id=seq)
                    submitted = (await client.post("/api/v1/forward_backward", json=body)).json()
                    asked = {"request_id": submitted["request_id"]}
                    answer = (await client.post("/api/v1/retrieve_future", json=asked)).json()
                    walk.on = False
                    assert "loss_fn_outputs" in answer, answer
                    found.append(walk.files)
                    walk.files = set()
        finally:
            backend.close()

    with walking() as walk:
        asyncio.run(main())
    # Work of the service in the background may begin during some of the calls.
    walk.files = min(found[1:], key=len)
    check(walk, 77)


def test_answer_of_a_server(tmp_path: Path) -> None:
    server = Process(modern=True)
    try:
        with walking() as walk:
            rollout = HTTPRollout([server.url], VLLM(), folder=tmp_path)
            asyncio.run(rollout.generate(PROMPT, endless(3)))
            with walk.recording():
                answer = asyncio.run(rollout.generate(PROMPT, endless(3)))
            rollout.close()
    finally:
        server.kill()
    assert len(answer.tokens) == 3
    check(walk, 10)
