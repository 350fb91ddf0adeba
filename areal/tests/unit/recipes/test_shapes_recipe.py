"""The recipe that counts shapes: its pictures, and a few of its steps."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[4] / "recipes" / "shapes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("count")


def test_control_has_the_same_questions_with_other_pictures(recipe: Any) -> None:
    right = recipe.samples(8, random.Random(0), shuffled=False)
    control = recipe.samples(8, random.Random(0), shuffled=True)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(right, control, strict=True))
    pictures = [[sample["pixel_values"].sum().item() for sample in made] for made in (right, control)]
    assert pictures[0] != pictures[1]
    assert sorted(pictures[0]) == sorted(pictures[1])
    # 16 tokens stand for a picture of 4 x 4 cells, and one token is the answer.
    for sample in right:
        answers = sample["input_ids"].roll(-1)[sample["loss_mask"] > 0]
        assert recipe._chat.template.tokenizer.decode(answers).split()[0] in recipe.COUNTS
        assert sample["image_grid_thw"].tolist() == [[1, 8, 8]]


def test_supervised_and_sampled_steps_run(recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"PICTURES": 8, "HELD_OUT": 8, "SUPERVISED": 1, "REINFORCED": 1, "GROUP": 2, "EVERY": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(recipe, name, value)
    recipe.main(str(tmp_path), 0, shuffled=False)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [step for step, _ in curve] == [0, 1, 2]
    assert all(0 <= right <= 1 for _, right in curve)
