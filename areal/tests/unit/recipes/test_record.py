"""What a run leaves behind: settings, starts, samples, curves, and what an earlier run left."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.recipes import GRPOConfig, SFTConfig
from areal.recipes.record.evaluations import add_evaluation, read_evaluations
from areal.recipes.record.run_record import check_record, check_rows_of_record, start_record
from areal.recipes.record.samples import SampleLog
from areal.recipes.record.trackers import make_trackers


def config(output: Path, **changes: Any) -> SFTConfig:
    return SFTConfig(model="some/model", dataset="rows.jsonl", output=output, **changes)


def test_record_has_settings_code_and_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "code"
    repository.mkdir()
    monkeypatch.chdir(repository)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    (repository / "task.py").write_text("x = 1\n")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(("git", *command), check=True)
    (repository / "task.py").write_text("x = 2\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_KEY", "hidden")
    output = tmp_path / "run"
    start_record(config(output, lr=0.5), "sft", {"dataset": "abc"})
    start_record(config(output, lr=0.5, resume=True), "sft", {"dataset": "abc"})
    first, second = map(json.loads, (output / "starts.jsonl").read_text().splitlines())
    assert first["recipe"] == "sft"
    assert first["rows"] == {"dataset": "abc"}
    assert len(first["code"]) == 40
    assert first["changed"] is True
    assert first["environment"]["OMP_NUM_THREADS"] == "3"
    assert {"python", "packages", "host", "machine", "command", "ranks", "dtype"} <= set(first)
    assert second["time"] >= first["time"]
    assert "+x = 2" in (output / "code.diff").read_text()
    assert "hidden" not in "".join(path.read_text() for path in output.iterdir())
    # The settings are a file that a run can begin with.
    assert SFTConfig(**tomllib.loads((output / "config.toml").read_text())) == config(output, lr=0.5, resume=True)


def test_no_record_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "trackers": ["jsonl", "wandb"],
        "wandb": {"project": "sums", "api_key": "hidden", "settings": {"access-token": "hidden"}},
        "engine": {"activation_checkpointing": "full"},
    }
    servers = ["http://me:hidden@a:8000/v1"]
    run = GRPOConfig(
        model="m",
        output=tmp_path,
        reward="a:b",
        servers=servers,
        rollout={"api_key": "hidden", "token_limit": 7},
        **settings,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv",
        [
            "areal",
            "grpo",
            "rollout.api_key=hidden",
            f"servers={servers}",
            "max_new_tokens=9",
            'wandb={ api_key = "hidden", project = "sums", settings = { token = "hidden" } }',
            "a text, or none=",
        ],
    )
    start_record(run, "grpo", {})
    texts = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "hidden" not in texts
    record = tomllib.loads((tmp_path / "config.toml").read_text())
    assert record["servers"] == ["http://a:8000/v1"]
    assert record["rollout"] == {"token_limit": 7}
    assert record["wandb"] == {"project": "sums", "settings": {}}
    assert {name: record[name] for name in ("max_tokens_per_mb", "max_new_tokens", "engine")} == {
        "max_tokens_per_mb": 4096,
        "max_new_tokens": 256,
        "engine": {"activation_checkpointing": "full"},
    }
    command = json.loads((tmp_path / "starts.jsonl").read_text())["command"]
    assert command[2:] == [
        "rollout.api_key=***",
        "servers=['http://a:8000/v1']",
        "max_new_tokens=9",
        'wandb={"project": "sums", "settings": {}}',
        "a text, or none=",
    ]
    assert run.rollout["api_key"] == "hidden"


def test_evaluations_are_kept_row_by_row(tmp_path: Path) -> None:
    add_evaluation(tmp_path, 0, [[1.0], [0.0]])
    add_evaluation(tmp_path, 2, [[1.0], [0.5]])
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 3, "rew\n')
    add_evaluation(tmp_path, 2, [[1.0], [1.0]])
    assert read_evaluations(tmp_path) == {0: [[1.0], [0.0]], 2: [[1.0], [1.0]]}
    start_record(config(tmp_path, resume=True), "sft", {})
    assert len(read_evaluations(tmp_path)) == 2
    start_record(config(tmp_path), "sft", {})
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_another_run_does_not_replace_checkpoints(tmp_path: Path) -> None:
    check_record(config(tmp_path))
    start_record(config(tmp_path, steps=3), "sft", {"dataset": "abc"})
    check_record(config(tmp_path, steps=3))
    (tmp_path / "checkpoints" / "model" / "step-000002").mkdir(parents=True)
    with pytest.raises(ValueError, match="has checkpoints, such as step-000002: set resume = true"):
        check_record(config(tmp_path, steps=3))
    check_record(config(tmp_path, steps=9, resume=True, backend="fsdp:d2"))
    with pytest.raises(ValueError, match="dataset: the rows are not those with which the run in"):
        check_rows_of_record(config(tmp_path, resume=True), {"dataset": "other"})
    check_rows_of_record(config(tmp_path, resume=True), {"dataset": "abc"})
    with pytest.raises(ValueError, match=r"seed = 5, and the run in .* began with 0"):
        check_record(config(tmp_path, seed=5, resume=True))


def sample(group: int, reward: float) -> dict[str, Any]:
    """Two prompt tokens and three of an answer; a value of a token is at the position before it."""
    return {
        "input_ids": torch.tensor([65, 66, 67, 60, 10]),
        "loss_mask": torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]),
        "old_logprobs": torch.tensor([0.0, -1.0, -1.0, -1.0, 0.0]),
        "rollout_logprobs": torch.tensor([0.0, -1.0, -1.5, -1.0, 0.0]),
        "advantages": torch.tensor([0.0, 2.0, 2.0, 2.0, 0.0]),
        "versions": torch.tensor([0, 4, 4, 5, 0]),
        "rewards": torch.tensor(reward),
        "group_ids": torch.tensor(group),
        "truncated": torch.tensor(False),
    }


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_samples_without_versions_are_written(tmp_path: Path) -> None:
    """An episode of a user may leave them out."""
    log = SampleLog(tmp_path, 1, decode)
    log(1, [{name: value for name, value in sample(7, 1.0).items() if name != "versions"}])
    log.close()
    [line] = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert line["versions"] == []


def test_samples_are_written_as_lines_and_as_a_page(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, 1, decode)
    log(1, [sample(7, 1.0), sample(7, 0.0), sample(8, 0.5)])
    log(2, [sample(9, 0.25)])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["group"], line["reward"]) for line in lines] == [(1, 7, 1.0), (1, 7, 0.0), (2, 9, 0.25)]
    first = lines[0]
    assert (first["prompt"], first["answer"]) == ("AB", "C<\n")
    assert first["trained"] == [0, 0, 1, 1, 1]
    assert first["error"] == [0.0, 0.0, 0.0, 0.5, 0.0]
    assert (first["advantage"], first["versions"], first["truncated"]) == (2.0, [4, 5], False)
    page = (tmp_path / "samples.html").read_text()
    assert page.count("<tr><td>") == 3
    assert page.index("<td>2</td><td>9</td>") < page.index("<td>1</td><td>7</td>")
    assert 'title="+0.50000 nats">&lt;</b>' in page
    assert "http" not in page
    SampleLog(tmp_path, 1, decode, append=True).close()
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3
    SampleLog(tmp_path, 1, decode).close()
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_trackers_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra recipes is not installed")
    settings = GRPOConfig(model="m", output=tmp_path, trackers=("jsonl", "curves", "tensorboard"))
    for again in (False, True):
        tracker = make_trackers(settings.model_copy(update={"resume": again}), 2, ())
        tracker.log(1, {"rollout/reward": 0.5})
        tracker.log(1, {"eval/reward": 0.25})
        tracker.close()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == (4 if again else 2)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    make_trackers(settings, 2, ()).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert list((tmp_path / "tensorboard").glob("events*"))
