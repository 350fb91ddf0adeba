"""The same code on the other engines: equal initial factors, equal numbers up to rounding, and one format of checkpoints."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import (
    STEP,
    data,
    gradients,
    request,
    run,
    same,
    scaled,
    trained,
    weights,
)
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdapterSpec

OTHERS = [
    pytest.param(
        f"{engine}:d1",
        marks=[pytest.mark.skipif(find_spec(engine) is None, reason=f"needs the extra {engine}"), *marks],
        id=engine,
    )
    for engine, marks in (("megatron", []), ("jax", []))
]


@pytest.mark.parametrize("backend", OTHERS)
def test_other_engine_trains_the_same_models(backend: str, start: Start, tmp_path: Path) -> None:
    fsdp, other = start("fsdp:d1", max_tokens_per_mb=64), start(backend, max_tokens_per_mb=64)
    for server in (fsdp, other):
        server.create_model("a", AdapterSpec(4, seed=3))
    assert same(weights(fsdp, "a"), weights(other, "a"))

    # A step, and a refused request before the gradient of the next one is complete.
    samples, overflow = data("logprobs", "advantages"), scaled(data("logprobs", "advantages"), 1e30, "logprobs")
    for server in (fsdp, other):
        run(server, request("a", data("weights")))
        server.optim_step("a", STEP)
        run(server, request("a", samples, "ppo"))
        assert isinstance(server.forward_backward([request("a", overflow, "ppo")])[0], UserError)
    mine, theirs = gradients(other, "a"), gradients(fsdp, "a")
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))

    # A checkpoint of one goes on in the other, with its optimizer.
    results = [run(server, request("a", data("weights", seed=1))) for server in (fsdp, other)]
    for server in (fsdp, other):
        server.optim_step("a", STEP)
    other.save("a", tmp_path / "a")
    assert fsdp.load("b", tmp_path / "a", with_optimizer=True) == AdapterSpec(4, seed=3, alpha=32.0)
    assert same(weights(fsdp, "b"), weights(other, "a"))
    for seed in range(2):
        results = [
            run(fsdp, request("b", data("weights", seed=seed))),
            run(other, request("a", data("weights", seed=seed))),
        ]
        assert results[0].metrics["loss:sum"] == pytest.approx(results[1].metrics["loss:sum"], rel=1e-4, abs=1e-3)
        for x, y in zip(results[0].logprobs, results[1].logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-3)
        for server, model in ((fsdp, "b"), (other, "a")):
            server.optim_step(model, STEP)
    trained(other, "c", steps=0)
    other.delete("a")
    assert other.group.adapters.names == ("default", "model-1")
