"""Scores of reasoning-gym's data sets."""

from __future__ import annotations

import pytest

reasoning_gym = pytest.importorskip(
    "reasoning_gym", reason="needs a C compiler to be installed, see docs/installation.md"
)

from areal.trainer.rewards import reasoning_gym_reward  # noqa: E402


def test_the_data_set_of_an_item_scores_its_answers() -> None:
    reward = reasoning_gym_reward()
    for name in ("chain_sum", "countdown"):
        for entry in reasoning_gym.create_dataset(name, size=2, seed=1):
            right = entry["answer"] if name == "chain_sum" else entry["metadata"]["expression"]
            assert reward(entry, [{"role": "assistant", "content": f" {right}\n"}]) == 1.0
            assert reward(entry, [{"role": "assistant", "content": "-1"}]) < 0.5


def test_items_of_other_data_sets_are_named() -> None:
    with pytest.raises(ValueError, match=r"item = \{'question': 'a'\}: .*metadata\['source_dataset'\]"):
        reasoning_gym_reward()({"question": "a"}, "b")
    with pytest.raises(ValueError, match="no_such_set"):
        reasoning_gym_reward()({"metadata": {"source_dataset": "no_such_set"}}, "b")
