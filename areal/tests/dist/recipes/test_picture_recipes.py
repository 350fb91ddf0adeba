"""Supervised fine-tuning on messages with pictures, from files."""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from areal.recipes import grpo, sft
from areal.tests.dist.recipes.policy_runs import curve
from areal.tests.harness.recipes.recipe_data import SETTINGS, reward
from areal.tests.harness.tiny import writing
from areal.tests.harness.world import locked, world

RECIPE = Path(__file__).parents[4] / "recipes" / "shapes"


def shapes() -> Any:
    """Return the pictures of the recipe that counts shapes."""
    sys.path.insert(0, str(RECIPE))
    try:
        return importlib.import_module("pictures")
    finally:
        sys.path.remove(str(RECIPE))


def seeing_model(folder: Path, *, processor: bool = True) -> str:
    """Write a model with a vision tower, its tokenizer and, unless it is left out, its image processor."""
    chat = shapes().chat()
    shapes().write_model(folder)
    torch.manual_seed(0)
    with writing():
        AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        chat.template.tokenizer.save_pretrained(folder)
        if processor:
            chat._pictures._processor.save_pretrained(folder)
    return str(folder)


def rows(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return questions about pictures that are in files, and one without a picture."""
    rng, made = random.Random(0), []
    for i in range(number):
        question, answer = shapes().conversation(1 + i % 4, rng)
        # Each rank writes the files, and another may read them meanwhile.
        own = folder / f"{i}-{os.getpid()}.png"
        question["content"][0]["image"].save(own)
        own.replace(folder / f"{i}.png")
        question["content"][0]["image"] = str(folder / f"{i}.png")
        made.append({"messages": [question, answer]})
    return [
        *made,
        {"messages": [{"role": "user", "content": "How many shapes ?"}, {"role": "assistant", "content": "four"}]},
    ]


@pytest.mark.world(1, 2)
def test_sft_trains_on_pictures_of_files(tmp_path: Path) -> None:
    with locked(tmp_path / "model"):
        if not (tmp_path / "rows").exists():
            seeing_model(tmp_path / "model")
            (tmp_path / "rows").mkdir()
    run = sft(
        str(tmp_path / "model"),
        rows(tmp_path / "rows", 15),
        backend=f"fsdp:d{world().size}",
        output=tmp_path / "run",
        steps=6,
        **{**SETTINGS, "batch_size": 8, "lr": 1e-2},
    )
    run.train()
    losses = curve(tmp_path / "run", ("train/loss",))["train/loss"]
    assert losses[-1] < 0.8 * losses[0]
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert not torch.equal(saved.model.visual.patch_embed.proj.weight, before.model.visual.patch_embed.proj.weight)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("processor", "message"),
    [(False, "takes images, and no image processor"), (True, "image = .*gone.png.*no picture can be read")],
    ids=["processor", "file"],
)
def test_what_cannot_be_read_is_named(processor: bool, message: str, tmp_path: Path) -> None:
    model = seeing_model(tmp_path / "model", processor=processor)
    given = rows(tmp_path, 1)
    given[0]["messages"][0]["content"][0]["image"] = str(tmp_path / "gone.png")
    with pytest.raises(ValueError, match=message):
        sft(model, given, output=tmp_path / "run", steps=1, **{**SETTINGS, "batch_size": 2}).train()


@pytest.mark.world(1, 2)
def test_grpo_trains_on_prompts_with_pictures(tmp_path: Path) -> None:
    """Sampled log-probs are those of the engine, before and after an update: both see the same picture, with the same weights."""
    size = world().size
    settings = {**SETTINGS, "lr": 1e-2, "backend": f"fsdp:d{size}"}
    # Random weights would answer with the token of an image.
    with locked(tmp_path / "model"):
        if not (tmp_path / "rows").exists():
            seeing_model(tmp_path / "model")
            (tmp_path / "rows").mkdir()
    shown = rows(tmp_path / "rows", 15)
    sft(str(tmp_path / "model"), shown, output=tmp_path / "sft", steps=8, batch_size=8, **settings).train()
    questions = [{"messages": row["messages"][:1]} for row in rows(tmp_path / "rows", 3)]
    run = grpo(
        str(tmp_path / "sft" / "model"),
        questions,
        reward,
        **{
            **settings,
            "temperature": 0.3,
            "max_new_tokens": 4,
            "groups": 4,
            "group_size": 2,
            "output": tmp_path / "run",
            "steps": 2,
        },
    )
    run.train()
    assert max(curve(tmp_path / "run", ("rollout/logprob_error",))["rollout/logprob_error"]) < 1e-5
    # The weights of the tower are trained, too.
    before, after = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name / "model").model.visual.patch_embed.proj.weight
        for name in ("sft", "run")
    )
    assert not torch.equal(before, after)


@pytest.mark.world(1)
def test_pictures_that_answers_cannot_see_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = seeing_model(tmp_path / "model")
    questions = [{"messages": row["messages"][:1], "answer": "one"} for row in rows(tmp_path, 4)]
    settings = {**SETTINGS, "max_new_tokens": 4, "output": tmp_path / "run", "steps": 1}
    with pytest.raises(ValueError, match=r"a prompt has a picture, and SGLang servers get tokens alone"):
        grpo(model, questions, reward, servers=("http://localhost:1",), server_kind="sglang", **settings).train()
    with pytest.raises(ValueError, match=r"text = True with a picture in a prompt"):
        grpo(model, questions, reward, text=True, **settings).train()
    assert not (tmp_path / "run").exists()
