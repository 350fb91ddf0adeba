"""The words that a user searches for lead to a page of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[4] / "docs"

PAGE_OF_WORD = {
    "config file": "quickstarts",
    "yaml": "quickstarts",
    "jsonl": "datasets",
    "dataset": "datasets",
    "curriculum": "datasets",
    "wandb": "run-directory",
    "tensorboard": "run-directory",
    "mlflow": "run-directory",
    "early stop": "evaluation-and-resume",
    "multi-turn": "recipes",
    "ctrl-c": "evaluation-and-resume",
    "checkpoint": "checkpoints",
    "resume": "checkpoints",
    "slurm": "clusters",
    "docker": "clusters",
    "lora": "lora",
    "tool calling": "chat",
    "reward function": "rewards",
    "batch size": "tuning",
    "gradient accumulation": "tuning",
    "mixed precision": "precision-and-memory",
    "OOM": "tuning",
    "out of memory": "troubleshooting",
}
"""Page, without its suffix, that answers a search for a word."""


@pytest.mark.parametrize(("word", "page"), PAGE_OF_WORD.items(), ids=lambda value: value.replace(" ", "_"))
def test_page_has_the_word(word: str, page: str) -> None:
    text = " ".join((DOCS / f"{page}.md").read_text().lower().split())
    assert word.lower() in text
