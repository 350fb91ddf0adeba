"""Recipes on a fixed data set: each learns, the same on any layout, with evaluations, an early end, and an end by Ctrl-C."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.recipes import dpo, reward_model, sft
from areal.tests.dist.recipes.policy_runs import curve
from areal.tests.harness import tiny
from areal.tests.harness.recipes.recipe_data import SETTINGS, recipe_model, rows
from areal.tests.harness.world import world

LAYOUTS = tiny.chosen("fsdp:d2", "megatron:p2")
SMALL: dict[str, Any] = {**SETTINGS, "batch_size": 8, "lr": 1e-2}


def pairs(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return questions with a right and a wrong answer."""
    return [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "wrong"} for row in rows(number, seed)]


@pytest.mark.parametrize("backend", LAYOUTS)
def test_sft_learns_and_keeps_the_best_model(backend: str, tmp_path: Path) -> None:
    template = Path(f"{tmp_path}-{world().rank}.jinja")
    template.write_text(f"{{# of this run #}}{AutoTokenizer.from_pretrained(recipe_model()).chat_template}")
    run = sft(
        recipe_model(),
        rows(32),
        evaluation=rows(8, 1),
        backend=backend,
        output=tmp_path,
        chat_template=str(template),
        epochs=2,
        eval_every=3,
        keep_best=True,
        **SMALL,
    )
    assert run.build().steps == 8
    result = run.train()
    got = curve(tmp_path, ("train/loss", "eval/loss"))
    assert len(got["train/loss"]) == 8
    assert got["train/loss"][-1] < 0.8 * got["train/loss"][0]
    assert [its["eval/loss"] for its in run.results.by_step.values()] == got["eval/loss"]
    assert list(run.results.by_step) == [0, 3, 6, 8]
    assert result["eval/loss"] == min(got["eval/loss"])
    for name in ("best", "model"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.num_hidden_layers == 2
        # A run that begins with it renders messages in the same way.
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == template.read_text()


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d2"))
def test_patience_ends_a_run_that_does_not_become_better(backend: str, tmp_path: Path) -> None:
    run = sft(
        recipe_model(),
        rows(32),
        evaluation=rows(8, 1),
        backend=backend,
        output=tmp_path,
        steps=20,
        eval_every=1,
        patience=2,
        **{**SMALL, "lr": 5.0},
    )
    run.train()
    assert run.results.best_step is not None
    assert run.trainer.step == run.results.best_step + 2
    assert run.trainer.step < 20


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:t2"))
def test_interrupt_saves_a_checkpoint_and_a_resumed_run_is_the_same(backend: str, tmp_path: Path) -> None:
    def run(output: Path, **changes: Any) -> Any:
        return sft(recipe_model(), rows(32), backend=backend, output=output, steps=6, **SMALL | changes)

    run(tmp_path / "full").train()
    stopped = run(tmp_path / "parts").build()
    take = stopped.trainer._take_step

    def take_and_signal(batch: Any) -> Any:
        output = take(batch)
        # One rank alone gets the signal, as by `kill`: all end after the same step.
        if stopped.trainer.step == 3 and world().rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return output

    stopped.trainer._take_step = take_and_signal
    with pytest.raises(SystemExit) as ended:
        stopped.train()
    assert ended.value.code == 130
    assert stopped.checkpoints.steps(["model"]) == [3]
    run(tmp_path / "parts", resume=True).train()
    names = ("train/loss", "train/grad_norm")
    assert curve(tmp_path / "parts", names) == curve(tmp_path / "full", names)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_dpo_raises_the_margin(backend: str, tmp_path: Path) -> None:
    result = dpo(
        recipe_model(),
        pairs(24),
        evaluation=pairs(8, 1),
        backend=backend,
        output=tmp_path,
        steps=6,
        save_model=False,
        **SMALL,
    ).train()
    got = curve(tmp_path, ("train/preference/margin", "train/loss"))
    assert got["train/loss"][0] == pytest.approx(0.6931, abs=1e-3)
    assert got["train/preference/margin"][-1] > 0.1
    assert result["eval/preference/accuracy"] == 1.0


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d2"))
def test_reward_model_prefers_the_better_answer(backend: str, tmp_path: Path) -> None:
    result = reward_model(
        recipe_model(), pairs(32), held_out=8, backend=backend, output=tmp_path, steps=6, save_model=False, **SMALL
    ).train()
    assert result["eval/preference/accuracy"] == 1.0
    assert result["eval/loss"] < 0.5
