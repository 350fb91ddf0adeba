"""`areal grpo CONFIG.toml key=value`: settings, mistakes, a dry run, and a run that starts its ranks."""

import json
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.cli.run_recipe import read_settings, run_recipe, run_reproduce
from areal.recipes import GRPOConfig
from areal.recipes.reproduce import RunStart, compare, read_record
from areal.tests.harness.processes import needs_own_world
from areal.tests.harness.recipes.recipe_data import recipe_model, rows
from areal.tests.harness.world import one_rank

REWARD = "areal.tests.harness.recipes.recipe_data:reward"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with the settings of a run, and its rows."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows(16))))
    text = f"""
        model = "{recipe_model()}"
        dataset = "{data}"
        reward = "{REWARD}"
        output = "{tmp_path / "run"}"
        dtype = "float32"
        steps = 2
        groups = 2
        group_size = 2
        max_new_tokens = 4
        [engine]
        activation_checkpointing = "full"
    """
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


def test_settings_of_file_and_command_line(file: Path) -> None:
    options = [str(file), "lr=1e-6", "steps=7", "engine.fsdp={compile=true}", "system=Be short.", "--resume"]
    got = read_settings(options)
    assert (got["lr"], got["steps"], got["system"], got["resume"]) == (1e-6, 7, "Be short.", True)
    assert got["engine"] == {"activation_checkpointing": "full", "fsdp": {"compile": True}}
    assert GRPOConfig(**got).engine_config().activation_checkpointing == "full"
    resumed = file.parent / "resumed.toml"
    resumed.write_text("resume = false")
    assert read_settings(["--resume", str(resumed)]) == {"resume": True}
    assert "lr" not in read_settings(["lr=1e-6", "lr="])
    assert read_settings([str(file), "engine.activation_checkpointing="])["engine"] == {}
    assert read_settings(["engine.grad_sync=call", str(file)])["engine"] == {
        "grad_sync": "call",
        "activation_checkpointing": "full",
    }
    # An empty table turns an option on.
    assert read_settings(["engine.fsdp.quantization.format="]) == {}
    # A file as that of a run with this output.
    (file.parent / "lr=1e-6.toml").write_text("steps = 7")
    assert read_settings([str(file.parent / "lr=1e-6.toml")]) == {"steps": 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["grups=3"], "areal grpo: GRPOConfig has no field 'grups': did you mean 'groups'?"),
        (["learning_rate=1"], "did you mean 'lr'?"),
        (["lr=fast"], "lr: Input should be a valid number, unable to parse string as a number"),
        (["engine.activation_checkpoint=full"], "activation_checkpoint = 'full': Extra inputs are not permitted"),
        (["engine.dtype=float32"], "engine: engine.dtype is set by dtype: leave it out here"),
        (["optimizer.lr=1"], "optimizer: optimizer.lr is set by lr: leave it out here"),
        (["group_size=1"], "group_size = 1: answers are compared within a group: set at least 2"),
        (["epochs=1"], "steps = 2 with epochs = 1.0: both say how long to train"),
        (["--fast"], "'--fast': expected a file CONFIG.toml, key=value, --dry-run, --resume or --ray"),
        (["no.toml"], "no.toml: there is no such file"),
        (["dataset=rows.jsnol"], "dataset = 'rows.jsnol': there is no such file"),
        (["reward=areal.tests.harness.recipes.recipe_data:rewrad"], "has no 'rewrad': did you mean 'reward'?"),
        (["model=/no/such/model"], "model = '/no/such/model': no tokenizer can be read there"),
        (["backend=fsdp:d2t"], "fsdp:d2t"),
        (["servers=['a']", "start_server=vllm serve"], "both generate; leave one of them out"),
        (["max_new_tokens=999"], "and the model's context is 256: leave out long rows, or lower the number"),
        (["max_context=10"], "and max_context is 10: raise it, leave out long rows, or lower the number"),
        (["dtype.name=x"], "dtype.name=x: dtype = 'float32' is no table; set or leave out dtype itself"),
        (["engine.dtype=x", "engine.dtype.name="], "engine.dtype.name=: engine.dtype = 'x' is no table"),
        (["patience=2"], "patience = 2 without eval_every: it counts evaluations during training"),
        (["eval_every=1"], "eval_every = 1 without rows for evaluation: set evaluation or held_out"),
        (["reward=builtins:abs"], "it is called with (row, answer), or (row, answer, messages)"),
        (["text=true", "tools=['a:b']"], "text = True with tools: calls need a chat template"),
    ],
)
def test_mistakes_are_lines(options: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_recipe("grpo", [str(file), *options, *([] if "--fast" in options else ["--dry-run"])]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (file.parent / "run").exists()


def test_dry_run_shows_settings_memory_and_the_first_row(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_recipe("grpo", [str(file), "backend=fsdp:d4", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert '"group_size": 2' in text
    assert "fsdp:d4: 4 ranks, float32" in text
    assert "parameters: weights, gradients and optimizer state take" in text
    first = rows(1)[0]["prompt"]
    assert text.endswith(f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n\n")
    assert not (file.parent / "run").exists()


def test_dry_run_marks_what_is_trained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"model={recipe_model()}", f"dataset={file.parent / 'rows.jsonl'}", f"output={file.parent / 'run'}"]
    assert run_recipe("sft", [*settings, "--dry-run"]) == 0
    first = rows(1)[0]
    assert f"<|im_start|>assistant\n[[{first['answer']}<|im_end|>]]\n" in capsys.readouterr().out


def test_help_names_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_recipe("grpo", []) == 0
    text = capsys.readouterr().out
    assert "usage: areal grpo [CONFIG.toml]" in text
    assert all(f"\n  {name} (" in text for name in GRPOConfig.model_fields)
    assert "\n  servers ([]): " in text
    assert '\n  output ("runs/grpo"): ' in text
    assert "\n  epochs (none): " in text
    assert all(field.description for field in GRPOConfig.model_fields.values())


def test_a_run_is_reproduced_to_the_bit(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = file.parent / "run"
    assert run_reproduce([str(output)]) == 1
    assert "has no config.toml: name the directory of a run" in capsys.readouterr().err
    with one_rank():
        assert run_recipe("grpo", [str(file), "lr=1e-3"]) == 0
        before = (output / "metrics.jsonl").read_bytes()
        assert run_reproduce([str(output)]) == 0
        assert capsys.readouterr().out == "the first 2 steps are the same to the bit\n"
        assert (output / "metrics.jsonl").read_bytes() == before
        lines = [json.loads(line) for line in before.decode().splitlines()]
        lines[1]["actor/loss"] += 1e-12
        (output / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert run_reproduce([str(output), "2"]) == 1
        assert capsys.readouterr().out.startswith("step 2: actor/loss was ")
        assert run_reproduce([str(output), "tolerance=1e-6"]) == 0
        assert capsys.readouterr().out.startswith("the first 2 steps differ by ")
        # A change of one key in a table leaves the others as they were.
        recorded = read_record(output, output / "again", {"engine": {"grad_sync": "call"}}).settings["engine"]
        assert recorded == {"activation_checkpointing": "full", "grad_sync": "call"}
        assert run_reproduce([str(output), "1", "seed=5", "tolerance=1e-6"]) == 1
        assert capsys.readouterr().out.startswith("step 1: ")
        # Without evaluations, whose rows may have been passed, and without a profile.
        settings, profile = (output / "config.toml").read_text(), output / "profile"
        own = f'eval_every = 1\npatience = 1\nprofile = "{profile}"\n'
        (output / "config.toml").write_text(own + settings)
        assert run_reproduce([str(output), "1"]) == 0
        assert not profile.exists()
    for old, new, message in (
        ("max_staleness = 0", "max_staleness = 1", "max_staleness = 1: which weights begin an answer depends on speed"),
        ("reward = ", "system = 'x' # ", "reward was passed to the run as an object"),
    ):
        (output / "config.toml").write_text(settings.replace(old, new).replace('system = ""', ""))
        assert run_reproduce([str(output)]) == 1
        assert message in capsys.readouterr().err


class Repeated:
    """A run that trains nothing, and has logged these numbers at its end."""

    speaks = True

    def __init__(self, output: Path, **numbers: float) -> None:
        self.config, self.trainer, self._numbers = SimpleNamespace(output=output), self, numbers

    def build(self) -> AbstractContextManager[None]:
        return nullcontext()

    def train(self, steps: int) -> None:
        lines = (json.dumps({"step": step, **self._numbers}) for step in range(1, steps + 1))
        (self.config.output / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("recipe", "reward", "differing"),
    [("distill", None, []), ("distill", "my:reward", ["rollout/reward"]), ("grpo", None, ["rollout/reward"])],
)
def test_reward_that_was_passed_to_a_distillation_is_not_compared(
    recipe: str, reward: str | None, differing: list[str], tmp_path: Path
) -> None:
    recorded = RunStart(recipe, {"reward": reward}, {1: {"actor/loss": 0.5, "rollout/reward": 0.4}})
    run: Any = Repeated(tmp_path, **{"actor/loss": 0.5, "rollout/reward": 0.0})
    found = compare(recorded, run, 1, 0.0)
    assert found is not None
    assert [line.split()[2] for line in found.lines] == differing


def command(*options: Any) -> list[str]:
    return [sys.executable, "-m", "areal.cli", *map(str, options)]


@needs_own_world
def test_command_starts_its_ranks_and_leaves_a_record_under_torchrun(file: Path) -> None:
    done = subprocess.run(
        command("grpo", file, "backend=fsdp:d2", "checkpoint_every=1"), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "finished 2 steps" in done.stderr
    output = file.parent / "run"
    assert {path.name for path in output.iterdir()} >= {
        *("config.toml", "starts.jsonl", "metrics.jsonl", "samples.jsonl", "samples.html", "checkpoints", "model"),
    }
    assert json.loads((output / "starts.jsonl").read_text())["ranks"] == 2
    again = subprocess.run(command("grpo", output / "config.toml"), capture_output=True, text=True, timeout=240)
    assert again.returncode == 1
    assert "has checkpoints, such as step-000002: set resume = true" in again.stderr


@needs_own_world
def test_steps_are_reproduced_on_another_layout_under_torchrun(file: Path) -> None:
    output = file.parent / "run"
    for options in (
        ("grpo", file, "groups=4", "group_size=4"),
        ("reproduce", output, "2", "backend=fsdp:d2", "tolerance=1e-4"),
    ):
        done = subprocess.run(command(*options), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert "the first 2 steps differ by " in done.stdout


@needs_own_world
def test_ctrl_c_saves_and_exits_with_130_under_torchrun(file: Path) -> None:
    process = subprocess.Popen(command("grpo", file, "steps=500", "backend=fsdp:d2"), stderr=subprocess.PIPE, text=True)
    output = file.parent / "run"
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "a checkpoint was saved: resume = true continues" in error
    assert "Traceback" not in error
    assert list((output / "checkpoints" / "policy").glob("step-*"))


@needs_own_world
def test_record_is_there_after_a_kill_at_the_first_step(file: Path) -> None:
    process = subprocess.Popen(command("grpo", file, "steps=500"), stderr=subprocess.DEVNULL)
    output = file.parent / "run"
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads((output / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    assert json.loads((output / "starts.jsonl").read_text())["recipe"] == "grpo"
    assert (output / "config.toml").exists()
    assert len((output / "samples.jsonl").read_text().splitlines()) >= 4
