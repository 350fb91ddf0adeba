"""The reference of settings is that of the classes, and TOML files in the documentation have settings that exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from areal.recipes import DistillConfig, DPOConfig, GRPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from areal.recipes.config import RunConfig
from areal.tests.lint.pages import pages

ROOT = Path(__file__).parents[4]
CLASSES: dict[str, type[RunConfig]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RewardModelConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "distill": DistillConfig,
}
FILES = [
    pytest.param(name, code, id=f"{page.path.stem}-{name}")
    for page in pages(ROOT)
    for _, code in page.blocks("toml")
    for name in re.findall(r"\A# areal (\w+) run.toml$", code, re.MULTILINE)
]
"""Files of settings, whose first line is a command."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Return the module that writes the page."""
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "tools" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_settings_is_written_from_the_classes(tool: ModuleType) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert text == tool.page(), "docs/configuration.md is stale: run python tools/settings_page.py"


@pytest.mark.parametrize("name", CLASSES)
def test_page_has_every_setting_of_every_recipe(tool: ModuleType, name: str) -> None:
    text = tool.page()
    assert not [setting for setting in CLASSES[name].model_fields if f"\n| `{setting}` |" not in text]


def test_default_that_a_recipe_changes_is_in_its_section(tool: ModuleType) -> None:
    section = tool.page().partition("## PPO with a critic: ppo\n")[2]
    assert "| `groups` | integer | `64` |" in section
    assert "| `lr` | number | `1e-06` |" in tool.page().partition("optimisation: dpo\n")[2].partition("\n## ")[0]


def test_values_of_settings(tool: ModuleType) -> None:
    fields = GRPOConfig.model_fields
    names = ("lr", "steps", "advantage", "servers", "ray", "save_model", "output", "trackers")
    assert [tool.values(fields[name].annotation) for name in names] == [
        "number",
        "integer",
        "`grpo`, `dr_grpo`, `rloo`",
        "list of strings",
        "table",
        "true, false",
        "path",
        "list of `console`, `jsonl`, `curves`, `tensorboard`, `wandb`, `mlflow`",
    ]


def test_documentation_has_files_of_settings() -> None:
    assert {"recipes-grpo", "recipes-sft"} <= {each.id for each in FILES}


@pytest.mark.parametrize(("name", "code"), FILES)
def test_files_of_settings_in_the_documentation_are_valid(name: str, code: str) -> None:
    assert CLASSES[name](**tomllib.loads(code)).model
