"""The same code on the other engine: equal initial factors, equal numbers up to rounding, and one format of checkpoints."""

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

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")


def test_megatron_trains_the_same_models(start: Start, tmp_path: Path) -> None:
    fsdp, megatron = start("fsdp:d1", max_tokens_per_mb=64), start("megatron:d1", max_tokens_per_mb=64)
    for server in (fsdp, megatron):
        server.create_model("a", AdapterSpec(4, seed=3))
    assert same(weights(fsdp, "a"), weights(megatron, "a"))

    # A step, and a refused request before the gradient of the next one is complete.
    samples, overflow = data("logprobs", "advantages"), scaled(data("logprobs", "advantages"), 1e30, "logprobs")
    for server in (fsdp, megatron):
        run(server, request("a", data("weights")))
        server.optim_step("a", STEP)
        run(server, request("a", samples, "ppo"))
        assert isinstance(server.forward_backward([request("a", overflow, "ppo")])[0], UserError)
    mine, theirs = gradients(megatron, "a"), gradients(fsdp, "a")
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))

    # A checkpoint of one goes on in the other, with its optimizer.
    results = [run(server, request("a", data("weights", seed=1))) for server in (fsdp, megatron)]
    for server in (fsdp, megatron):
        server.optim_step("a", STEP)
    megatron.save("a", tmp_path / "a")
    assert fsdp.load("b", tmp_path / "a", with_optimizer=True) == AdapterSpec(4, seed=3)
    assert same(weights(fsdp, "b"), weights(megatron, "a"))
    for seed in range(2):
        results = [
            run(fsdp, request("b", data("weights", seed=seed))),
            run(megatron, request("a", data("weights", seed=seed))),
        ]
        assert results[0].metrics["loss:sum"] == pytest.approx(results[1].metrics["loss:sum"], rel=1e-4, abs=1e-3)
        for x, y in zip(results[0].logprobs, results[1].logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-3)
        for server, model in ((fsdp, "b"), (megatron, "a")):
            server.optim_step(model, STEP)
    trained(megatron, "c", steps=0)
    megatron.delete("a")
    assert megatron.group.adapters.names == ("default", "model-1")
