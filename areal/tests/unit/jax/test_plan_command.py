"""`areal plan` of the JAX engine: its report on one CPU device, and what is refused before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax

from areal.cli.plan import run_plan
from areal.engine.jax.ahead import devices
from areal.plan.compiled_plan import plan_compiled
from areal.plan.state_bytes import count_parameters
from areal.plan.trace import Workload
from areal.tests.harness.tiny import config, family_dir

GIVEN = ["--tokens-per-rank", "64", "--sequence", "64"]


def test_report_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", family_dir("qwen3"), *GIVEN, "--backend", "jax:d1", "--topology", "cpu:1", "--memory", "0.0001"]
    assert run_plan([*given, "--micro-batch", "64", "dtype=bfloat16"]) == 0
    text = capsys.readouterr().out
    for words in (
        "jax:d1 on cpu",
        "1 micro-batches of 64 tokens",
        "memory of a device during the",
        "residuals",
        "does not fit",
    ):
        assert words in text


def test_plan_has_the_state_of_a_model() -> None:
    settings = {"path": family_dir("qwen3"), "dtype": "bfloat16", "activation_checkpointing": "full"}
    workload = Workload(sequences=4, length=16, micro_batch=32)
    plan = plan_compiled(config("jax:d1", **settings), workload, jax.devices()[:1])
    # Parameters, gradients and two moments in float32.
    parameters = 4 * count_parameters(settings["path"])
    assert {kind: plan.memory[kind] for kind in ("parameters", "gradients", "optimizer")} == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,
    }
    assert plan.n_mbs == 2
    assert plan.memory["temporaries"] > 0
    assert plan.collectives == {}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--topology", "v5p:2x2x1"], "pip install 'areal[tpu-compile]'"),
        (["--topology", "cpu:4096"], "JAX has started with"),
        (["--topology", "cpu:1", "--world-size", "2"], "which has 1 devices: leave --world-size out"),
        (["--topology", "cpu:1", "lora.rank=8"], "lora = LoRAConfig(rank=8"),
        (["--topology", "cpu:1", "--backend", "jax:t2"], "its 2 ranks do not divide the world"),
        (["--topology", "cpu:1", "grad_sync=micro_batch"], "grad_sync"),
        ([], "needs a layout and a topology"),
        (["--topology", "cpu:1", "--backend", "jax"], "needs a layout and a topology"),
        (["--topology", "cpu:1", "--picture", "x.svg"], "has no --picture"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert run_plan(["--model", family_dir("qwen3"), *GIVEN, "--backend", "jax:d1", *options]) == 1
    assert error in capsys.readouterr().err
