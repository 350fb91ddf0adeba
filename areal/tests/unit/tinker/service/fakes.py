"""Deterministic backends in memory that record their calls, and requests for them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal.tinker.backends.backend import ModelLimits
from areal.tinker.backends.errors import BackendLostError, UserError
from areal.tinker.backends.prepared import (
    AdamParams,
    AdapterSpec,
    PassResult,
    PreparedBatch,
    SampledAnswer,
    SamplingRequest,
    SamplingResult,
    TopLogprobs,
)
from areal.tinker.service.requests import Outcome, RawChunk, RawDatum, RawTensor, Sample, Submitted
from areal.tinker.service.service import Service
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.tenants.caller import Caller
from areal.tinker.service.tenants.caller_service import CallerService
from areal.tinker.service.verbs.forward_backward import ForwardBackward
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.optimizer import OptimStep
from areal.tinker.service.verbs.verb import Capabilities

LOCAL = Caller("local", admin=True)
LIMITS = ModelLimits(vocab_size=64, max_tokens=32, max_rank=16)
LOSSES = {
    "cross_entropy": {
        "inputs": frozenset({"target_tokens", "weights"}),
        "optional": frozenset(),
        "config": frozenset(),
    },
    "ppo": {
        "inputs": frozenset({"target_tokens", "logprobs", "advantages"}),
        "optional": frozenset({"sequence_ratio_mask"}),
        "config": frozenset({"clip_low_threshold", "clip_high_threshold"}),
    },
}


class FakeTraining:
    """A model is one number, which a step changes by its gradient. ``gate`` holds calls back while it is clear."""

    def __init__(self, batches_models: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.models: dict[str, dict[str, Any]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.lost = False
        self.closed = False
        self.fail_next: Exception | None = None
        self.threads: set[int] = set()
        self._batches_models = batches_models

    def limits(self) -> ModelLimits:
        return LIMITS

    def losses(self) -> Any:
        return LOSSES

    def optimizers(self) -> frozenset[str]:
        return frozenset({"adamw"})

    def batches_models(self) -> bool:
        return self._batches_models

    def _enter(self, *call: Any) -> None:
        self.gate.wait(20)
        self.threads.add(threading.get_ident())
        self.calls.append(call)
        if self.lost:
            self.models.clear()
            raise BackendLostError("a worker died")
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error

    def create_model(self, model_id: str, adapter: AdapterSpec) -> None:
        self._enter("create_model", model_id)
        if adapter.rank == 13:
            raise UserError("memory is short: 1 MiB available, 2 MiB needed")
        self.models[model_id] = {"weight": 0.0, "grad": 0.0, "steps": 0, "adapter": adapter}

    def _pass(self, batch: PreparedBatch, gradient: bool) -> PassResult:
        model = self.models[batch.model_id]
        logprobs = [-(d.target_ids + 1).astype(np.float32) / 64 + np.float32(model["weight"]) for d in batch.data]
        weights = [d.values.get("weights", d.values.get("advantages")) for d in batch.data]
        loss = float(-sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True)))
        if gradient:
            model["grad"] += float(sum(w.sum() for w in weights))
        return PassResult(logprobs, {"loss:sum": loss})

    def forward(self, batches: Sequence[PreparedBatch]) -> list[Any]:
        self._enter("forward", tuple(b.model_id for b in batches))
        return [self._pass(b, False) for b in batches]

    def forward_backward(self, batches: Sequence[PreparedBatch]) -> list[Any]:
        marks = tuple(int(b.data[0].input_ids[0]) for b in batches)
        self._enter("forward_backward", tuple(b.model_id for b in batches), marks)
        return [
            UserError("63 is not liked") if m == 63 else self._pass(b, True)
            for b, m in zip(batches, marks, strict=True)
        ]

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        self._enter("optim_step", model_id, params.learning_rate)
        model = self.models[model_id]
        model["weight"] += params.learning_rate * model["grad"]
        model["grad"], model["steps"] = 0.0, model["steps"] + 1
        return {"grad_norm:mean": 1.0}

    def _write(self, model_id: str, folder: Path) -> None:
        model = self.models[model_id]
        temporary = folder.with_name(folder.name + ".tmp")
        temporary.mkdir()
        state = {k: v for k, v in model.items() if k != "adapter"} | {"adapter": vars(model["adapter"])}
        (temporary / "state.json").write_text(json.dumps(state))
        os.replace(temporary, folder)

    def save(self, model_id: str, folder: Path) -> None:
        self._enter("save", model_id, folder)
        self._write(model_id, folder)

    def save_for_sampler(self, model_id: str, folder: Path) -> None:
        self._enter("save_for_sampler", model_id, folder)
        self._write(model_id, folder)

    def save_external(self, model_id: str, folder: Path) -> None:
        self._enter("save_external", model_id, folder)
        self._write(model_id, folder)

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> AdapterSpec:
        self._enter("load", model_id, with_optimizer)
        state = json.loads((folder / "state.json").read_text())
        adapter = AdapterSpec(**state["adapter"])
        self.models[model_id] = {**state, "grad": 0.0, "adapter": adapter}
        return adapter

    def delete(self, model_id: str) -> None:
        self._enter("delete", model_id)
        del self.models[model_id]

    def healthy(self) -> bool:
        return not self.lost

    def restart(self) -> None:
        self.calls.append(("restart",))
        self.lost = False

    def close(self) -> None:
        self.closed = True


class FakeSampling:
    """Answers with the weight of the snapshot and the prompt's first token."""

    def __init__(self) -> None:
        self.open_snapshots: dict[str, float] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.running = self.most_running = 0
        self.gate, self.reading = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.reading.set()
        self.closed = False

    def limits(self) -> ModelLimits:
        return LIMITS

    async def open(self, snapshot: str, folder: Path | None) -> None:
        self.calls.append(("open", snapshot, folder))
        weight = 0.0 if folder is None else json.loads((folder / "state.json").read_text())["weight"]
        await self.reading.wait()
        self.open_snapshots[snapshot] = weight

    async def release(self, snapshot: str) -> None:
        self.calls.append(("release", snapshot))
        del self.open_snapshots[snapshot]

    async def sample(self, snapshot: str, request: SamplingRequest) -> SamplingResult:
        weight = self.open_snapshots[snapshot]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            if request.prompt[0] == 62:
                raise RuntimeError("generation broke")
        finally:
            self.running -= 1
        n = len(request.prompt)
        answer = SampledAnswer(
            "stop", np.asarray([request.prompt[0], 1], np.int32), np.asarray([weight, -1.0], np.float32)
        )
        prompt = np.r_[np.nan, -np.ones(n - 1)].astype(np.float32) if request.prompt_logprobs else None
        k = request.prompt_top_k
        top = TopLogprobs(np.ones((n, k), np.int32), np.zeros((n, k), np.float32)) if k else None
        return SamplingResult([answer] * request.num_samples, prompt, top)

    def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed = True


def settings(root: Path, **changes: Any) -> ServiceSettings:
    return replace(
        ServiceSettings(
            root=root, base_models=("base", "alias"), model_path="/models/base", lease_s=2.0, disk_reserve_mib=1
        ),
        **changes,
    )


def capabilities(**changes: Any) -> Capabilities:
    """Values against which requests to a :class:`FakeTraining` are checked."""
    return Capabilities(LIMITS, LOSSES, frozenset({"adamw"}), settings(Path("unused"), **changes))


class LocalService(CallerService):
    """A service as its only user sees it, with the methods that an application needs of the service."""

    def __init__(self, service: Service) -> None:
        super().__init__(service.for_caller(LOCAL).parts, LOCAL)
        self.for_caller, self.trouble = service.for_caller, service.trouble


@contextlib.asynccontextmanager
async def serving(
    root: Path, training: FakeTraining | None = None, sampling: FakeSampling | None = None, **changes: Any
) -> AsyncIterator[LocalService]:
    """A started service as its only user sees it, which is stopped at the end."""
    service = Service(training or FakeTraining(), sampling, settings(root, **changes))
    await service.start()
    try:
        yield LocalService(service)
    finally:
        await service.stop()


def digest(*content: Any) -> bytes:
    return hashlib.sha256(repr(content).encode()).digest()


def tokens(*ids: int) -> list[RawChunk]:
    return [RawChunk("encoded_text", np.asarray(ids, dtype=np.int64))]


def floats(*values: float, shape: tuple[int, ...] | None = None) -> RawTensor:
    return RawTensor("float32", np.asarray(values, dtype=np.float32), shape)


def integers(*values: int, shape: tuple[int, ...] | None = None) -> RawTensor:
    return RawTensor("int64", np.asarray(values, dtype=np.int64), shape)


def datum(first: int = 1, weight: float = 1.0) -> RawDatum:
    return RawDatum(tokens(first, 2, 3), {"target_tokens": integers(2, 3, 4), "weights": floats(0.0, weight, 1.0)})


def train(model_id: str, seq_id: int | None, first: int = 1, **fields: Any) -> ForwardBackward:
    data = fields.pop("data", [datum(first)])
    return ForwardBackward(model_id, seq_id, digest("fb", first, fields), data=data, **fields)


def step(model_id: str, seq_id: int | None, **params: float) -> OptimStep:
    return OptimStep(model_id, seq_id, digest("step", params), params=params)


def sample(sampling_session_id: str | None, seq_id: int | None = None, first: int = 1, **fields: Any) -> Sample:
    fields.setdefault("prompt", tokens(first, 2))
    return Sample(digest("sample", first), sampling_session_id=sampling_session_id, seq_id=seq_id, **fields)


async def outcome(service: CallerService, submitted: Submitted, timeout_s: float = 10.0) -> Outcome:
    return await service.retrieve(submitted.request_id, timeout_s)


async def done(service: CallerService, request: Any) -> Any:
    """Submit a request and return its result."""
    answer = await outcome(service, await service.submit(request))
    assert answer.state == "done", answer
    return answer.result


async def refused(service: CallerService, request: Any, category: str = "user") -> str:
    """Submit a request that fails. Returns its error."""
    answer = await outcome(service, await service.submit(request))
    assert (answer.state, answer.category) == ("failed", category), answer
    assert answer.error is not None
    return answer.error


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.01)


async def new_model(
    service: CallerService,
    session_id: str | None = None,
    number: int = 0,
    rank: int = 4,
    alpha: float | None = None,
    **fields: Any,
) -> str:
    """Create a model. Returns its id."""
    session_id = session_id or await service.create_session(["test"])
    config = {"rank": rank, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": False, "alpha": alpha}
    request = CreateModel(session_id, number, digest("create", number), base_model="base", lora_config=config, **fields)
    return (await done(service, request))["model_id"]
