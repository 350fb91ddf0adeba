"""Compiled programs of the JAX engine: their number, their cache on disk, and how they divide arrays over ranks."""

from __future__ import annotations

import gzip
import json
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

import jax

from areal.api import MicroBatchSpec, MuonConfig, OptimizerConfig
from areal.engine.jax import optimizer
from areal.engine.jax.runtime.compilation import PROGRAM
from areal.plan.compiled_collectives import collectives
from areal.tests.dist.jax.compiled import compiled
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import Sample, chosen, global_batch, local_batch, loss, started
from areal.tests.harness.world import record, world

BUDGET = 96
"""Tokens of a micro-batch in the test of the number of programs."""


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the programs that JAX needs inside: ``programs``, and of them ``compiled``, the others being read from the cache on disk."""
    counts = {"programs": 0, "compiled": 0}

    def listen_seconds(event: str, duration_secs: float, **_: str | int) -> None:
        if event == PROGRAM:
            counts["programs"] += 1
            counts["compiled"] += 1

    def listen(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            counts["compiled"] -= 1

    jax.monitoring.register_event_duration_secs_listener(listen_seconds)
    jax.monitoring.register_event_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen_seconds)
        jax.monitoring.unregister_event_listener(listen)


def random_batch(rng: random.Random) -> list[Sample]:
    """Return 4 to 12 sequences of 1 to 90 tokens."""
    lengths = [rng.randint(1, 90) for _ in range(rng.randint(4, 12))]
    return [
        {"input_ids": torch.randint(4, 60, (n,)), "loss_mask": torch.ones(n), "advantages": torch.randn(n)}
        for n in lengths
    ]


@pytest.mark.world(1, timeout=240)
def test_random_batches_need_few_programs() -> None:
    rng = random.Random(0)
    with started("jax:d1", mb_spec=MicroBatchSpec(max_tokens_per_mb=BUDGET)) as engine:
        with counted() as warm_up:
            engine.train_batch(random_batch(rng), loss)
            engine.forward_batch(random_batch(rng))
        with counted() as rest:
            for _ in range(50):
                engine.train_batch(random_batch(rng), loss)
                engine.forward_batch(random_batch(rng))
    record("programs of JAX", "50 random batches", warm_up=warm_up["programs"], rest=rest["programs"])
    assert rest["programs"] <= 12


def train_and_count(folder: Path, backend: str, expected: str) -> None:
    """Train and evaluate with a cache. Writes the number of compiled programs, and compares it."""
    with counted() as counts, started(backend, jax={"compilation_cache": str(folder / "programs")}) as engine:
        batch = local_batch(engine, global_batch())
        step = engine.train_batch(batch, loss)
        engine.forward_batch(batch)
        again = engine.train_batch(batch, loss)
    print(counts, step.timings, again.timings)
    assert counts["programs"] > 4
    assert (counts["compiled"] == 0) == (expected == "none"), counts
    # The seconds of new programs count in no other phase. Later calls need none.
    assert step.timings["compile"] > 0
    assert step.timings["compile"] + step.timings["forward"] <= step.seconds
    assert sum(step.timings.values()) == pytest.approx(step.seconds, rel=0.1)
    assert "compile" not in again.timings


@needs_own_world
def test_second_start_compiles_nothing(tmp_path: Path) -> None:
    for expected in ("some", "none"):
        succeed(1, train_and_count, tmp_path, "jax:d1", expected, timeout=240)


@pytest.mark.world(1)
def test_new_programs_are_logged() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("areal.engine.jax")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with started("jax:d1") as engine:
            jax.clear_caches()
            engine.train_batch(global_batch(), loss)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any(re.search(r"_forward.* \(\d+ tokens, \d+ rows\) in [\d.]+ s", line) for line in lines), lines


# ---- what is divided over ranks


@pytest.mark.parametrize("backend", chosen("jax:d2", "jax:t2"))
def test_arrays_are_divided_over_ranks(backend: str) -> None:
    """Parameters, gradients and moments: all matrices are divided over all ranks, and only norms are on each rank in full."""
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        engine.train_batch(batch, loss)
        engine.forward_backward(batch, loss)
        shapes = {name: tuple(x.shape) for name, x in engine.named_tensors()}
        matrices, vectors = (
            sum(4 * torch.Size(shape).numel() for shape in shapes.values() if (len(shape) > 1) == wide)
            for wide in (True, False)
        )
        (memory,) = engine.memory()
        nbytes = matrices // world().size + vectors
        assert (memory.params.on_device, memory.grads.on_device) == (nbytes, nbytes)
        assert memory.optimizer.on_device == 2 * nbytes


@pytest.mark.world(1)
def test_profile_has_a_trace_of_the_programs(tmp_path: Path) -> None:
    with started("jax:d1") as engine:
        engine.train_batch(global_batch(), loss)
        with engine.profile(tmp_path) as folders:
            step = engine.train_batch(global_batch(), loss)
        assert folders == {0: tmp_path}
        assert list(step.timings) == ["data", "forward", "backward", "reduce", "optimizer"]
    assert (tmp_path / "trace-rank0.json.gz").exists()
    (trace,) = tmp_path.glob("jax-rank0/plugins/profile/*/*.trace.json.gz")
    with gzip.open(trace, "rt") as file:
        names = {str(event.get("name")) for event in json.load(file)["traceEvents"]}
    assert any("_forward" in name for name in names)
    assert any("_pull" in name for name in names)


@pytest.mark.parametrize("backend", chosen("jax:d2", "jax:t2"))
def test_programs_gather_weights_and_no_activations(backend: str) -> None:
    with started(backend) as engine:
        weights = {tuple(x.shape) for _, x in engine.named_tensors()}
        found, residuals = compiled(engine)
        dp, tp = engine.dims.dp, engine.dims.tp
    vocab, width = max(weights)
    wide = max(shape[0] for shape in weights - {(vocab, width)})
    # With tensor parallelism, one of the dimensions of a weight is divided.
    gathered = weights if tp == 1 else {s for a, *b in weights for s in [(a // tp, *b), (a, *(n // tp for n in b))]}
    for name, all_of_them in found.items():
        for each in all_of_them:
            print(name, each)
            shape = each.shape[1:] if each.shape[:1] == (1,) else each.shape
            if each.kind == "all-gather":
                assert dp > 1, f"{name}: {each}"
                assert shape in gathered or each.dtype.startswith("s"), f"{name} gathers an activation: {each}"
            # Logits are divided over tp, and so are the activations within a layer.
            in_full = tp > 1 and len(each.shape) == 3 and each.shape[-1] in (vocab, wide)
            assert not in_full or each.kind == "all-gather", f"{name}: {each}"
    forward = {each.kind for each in found["_forward"]}
    assert forward == {kind for kind, used in (("all-gather", dp > 1), ("all-reduce", tp > 1)) if used}
    # Residuals contain no gathered weight, and only this rank's streams.
    for leaf in residuals:
        local = leaf.addressable_data(0).shape
        print("residual", leaf.dtype, leaf.shape, local)
        assert local[1:] not in weights, f"a gathered weight is kept: {local}"
        assert leaf.size < 1000 or leaf.size // np.prod(local) >= dp, (
            f"an activation of all ranks is kept: {leaf.shape}"
        )
        assert tp == 1 or local[-1] not in (vocab, wide), f"an activation is kept in full: {local}"


@pytest.mark.world(2, timeout=400)
def test_muon_spreads_matrices_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange parts of matrices, and none gathers all of them."""
    kinds: set[str] = set()
    update = optimizer._update

    def recorded(*args: Any) -> Any:
        kinds.update(each.kind for each in collectives(update.lower(*args).compile().as_text()))
        return update(*args)

    monkeypatch.setattr(optimizer, "_update", recorded)
    settings = OptimizerConfig(type="muon", muon=MuonConfig(dtype="float32"))
    with started("jax:d2", optimizer=settings) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
    assert kinds == {"all-to-all"}
