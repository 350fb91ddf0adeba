"""Every program of every family compiles for TPUs: the compiler runs here, and no chip is needed. Plans read what it says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")
if find_spec("libtpu") is None:
    pytest.skip("the compiler of TPUs is not installed: make test-tpu", allow_module_level=True)

from areal.api import OptimizerConfig
from areal.cli.plan import run_plan
from areal.engine.jax.ahead.devices import planned_devices
from areal.engine.jax.ahead.programs import Programs
from areal.engine.jax.model.architecture import FAMILIES as OF_THE_ENGINE
from areal.engine.jax.model.token_outputs import Wanted
from areal.plan.compiled_collectives import collectives, step_collectives
from areal.tests.grid.models import FAMILIES, OUTSIDE_THE_GRID
from areal.tests.harness.tiny import config
from areal.tests.harness.world import record

LAYOUTS = {"v5p:2x2x1": ("jax:d2t2", "jax:d2t2"), "v6e:2x4": ("jax:d4c2", "jax:d2c2e2")}
"""Layouts on the devices of a topology: of a family without experts, and with."""

CONFIGS = {
    name: make for name, make in (FAMILIES | OUTSIDE_THE_GRID).items() if name.partition("_tied")[0] in OF_THE_ENGINE
}

WANTED = Wanted(frozenset({"logprobs", "entropy"}), 0)


def write_model(folder: Path, family: str, **changes: int) -> str:
    """Write the ``config.json`` of a small model of a family, and return its directory."""
    sizes = {"hidden_size": 256, "head_dim": 128, "vocab_size": 512, "intermediate_size": 256, **changes}
    CONFIGS[family](**sizes).save_pretrained(folder)
    return str(folder)


def programs_of(folder: Path, family: str, topology: str, backend: str, options: dict[str, Any], **changes: int) -> Any:
    """Return the programs of a small model on the devices of a topology."""
    path = write_model(folder, family, **changes)
    settings = {"path": path, "dtype": "bfloat16", "activation_checkpointing": "full", **options}
    return Programs.of(config(backend, **settings), planned_devices(topology), tokens=256, wanted=WANTED)


def compile_all(programs: Programs) -> dict[str, Any]:
    """Compile every program of a training step and of an evaluation. Returns the compiled programs by name."""
    forward, pull, _ = programs.forward_and_backward()
    update = programs.update(OptimizerConfig())
    return {"evaluate": programs.evaluation(), "forward": forward, "pull": pull, "update": update}


@pytest.mark.parametrize("topology", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_all_programs_compile(family: str, topology: str, tmp_path: Path) -> None:
    backend = LAYOUTS[topology]["moe" in family]
    programs = programs_of(tmp_path, family, topology, backend, {})
    # Splash on a whole stream, blocks on a divided one.
    assert (programs.spec.kernel is None) == ("c2" in backend or len(set(programs.spec.arch.windows)) > 1)
    compiled = compile_all(programs)
    peaks = {name: program.memory_analysis().peak_memory_in_bytes for name, program in compiled.items()}
    record(
        "TPU programs: peak MiB of a device",
        f"{family}, {topology}",
        **{n: f"{p / 2**20:.1f}" for n, p in peaks.items()},
    )
    assert all(peaks.values())


def test_head_in_chunks_is_gathered_and_reduced_once(tmp_path: Path) -> None:
    changes = {"vocab_size": 8192, "hidden_size": 1024}
    programs = programs_of(tmp_path, "qwen3", "v6e:2x4", "jax:d4c2", {"kept_logits_mb": 0}, **changes)
    vocabulary, width = programs.params["lm_head.weight"].shape
    found = {name: collectives(program.as_text()) for name, program in compile_all(programs).items()}
    # Embedding and head alone have as many rows as the vocabulary.
    traffic = {
        name: sum(each.elements(programs.spec.mesh.size) for each in those if vocabulary in each.shape)
        for name, those in found.items()
    }
    head = vocabulary * width
    record("TPU programs: elements of the head in collectives", "v6e:2x4", of_the_head=head, **traffic)
    # A lookup gathers the embedding once, and its gradient is reduced once.
    assert traffic["evaluate"] <= 2 * head
    assert traffic["forward"] + traffic["pull"] <= (3 + 2) * head
    in_loops = [each for those in found.values() for each in those if vocabulary in each.shape and each.times > 1]
    assert not in_loops, in_loops


def test_layers_are_gathered_in_each_pass(tmp_path: Path) -> None:
    """Of a layout of shards, the collectives of a step have the bytes of the weights: the loop over layers counts."""
    n_layers = 5
    programs = programs_of(tmp_path, "qwen3", "v5p:2x2x1", "jax:d4", {}, num_hidden_layers=n_layers)
    forward, backward, _ = programs.forward_and_backward()
    found = step_collectives({forward.as_text(): 1, backward.as_text(): 1}, programs.spec.mesh.shape)
    nbytes = {name: calls.nbytes for (name, _, _, _), calls in found.items()}
    weights = {name: x.size for name, x in programs.params.items() if "norm" not in name}
    # Gathered in bfloat16 in each pass, and the embedding for the lookup only; gradients are reduced in float32.
    expected = 2 * 2 * sum(weights.values()) - 2 * weights["model.embed_tokens.weight"]
    assert nbytes["all_gather"] == pytest.approx(expected, rel=0.02)
    reduced = 4 * sum(weights.values())
    assert nbytes["reduce_scatter"] + nbytes.get("all_reduce", 0) == pytest.approx(reduced, rel=0.1)


def test_command_plans_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", write_model(tmp_path, "qwen3"), "--sequence", "64", "--tokens-per-rank", "64"]
    assert run_plan([*given, "--backend", "jax:t2", "--topology", "v5e:2x2"]) == 0
    text = capsys.readouterr().out
    for words in ("jax:d2t2 on TPU v5 lite", "temporaries", "reduce_scatter", "all_gather"):
        assert words in text
    for topology, error in (
        ("v5e:3x3", "not divisible"),
        ("v9:2x2", "choose chips of v4"),
        ("v5p:16x16x16", "at most"),
    ):
        assert run_plan([*given, "--backend", "jax:t2", "--topology", topology]) == 1
        assert error in capsys.readouterr().err
