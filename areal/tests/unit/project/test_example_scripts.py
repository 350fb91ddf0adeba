"""Every example script runs to its end on a tiny model, and writes what its page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.tests.harness.processes import needs_own_world
from areal.tests.harness.recipes.character_tokenizer import EXAMPLES
from areal.tests.harness.recipes.recipe_data import save_model

PAIRS = ("--steps", "12", "--batch-size", "16", "--eval-size", "32")
ROLLOUTS = (
    *("--steps", "2", "--groups", "2", "--group-size", "2", "--eval-size", "4", "--kl-coef", "0.01"),
    *("--warmup-steps", "1", "--warmup-batch-size", "4"),
)
CALLS = (*ROLLOUTS[:8], *ROLLOUTS[10:])
SCRIPTS = {
    "dpo.py": (PAIRS, "model/config.json"),
    "sft.py": (("--steps", "2", "--batch-size", "8", "--eval-size", "4", "--reload-samples", "2"), "losses.json"),
    "reward_model.py": (PAIRS, "model/config.json"),
    "grpo.py": (ROLLOUTS, "curves.png"),
    "ppo.py": (ROLLOUTS, "curves.png"),
    "calculator.py": (CALLS, "calculator.json"),
}
"""Options of each script, and a file that it writes to its output directory."""


def test_every_script_has_a_case() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert scripts == {*SCRIPTS, "smollm.py", "tiny.py"}, (
        "the last two write models, which take a download or one of these scripts"
    )


@needs_own_world
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="needs a C compiler to be installed, see docs/installation.md")
    save_model(tmp_path / "tiny")
    options, written = SCRIPTS[name]
    command = [
        sys.executable,
        str(EXAMPLES / name),
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--output",
        "out",
        *options,
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK")}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "out" / written).exists(), done.stdout
