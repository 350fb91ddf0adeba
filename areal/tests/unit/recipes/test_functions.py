"""Functions by name, and rewards of users."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal.inference import Completion
from areal.recipes.answer_reward import answer_reward
from areal.recipes.functions import function_name, load_function
from areal.tests.harness.recipes.recipe_data import reward

SOURCE = "def double(x):\n    return 2 * x\nclass Judge:\n    @staticmethod\n    def score(x):\n        return x\nlimit = 3\n"


def test_functions_are_found_in_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_recipes.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    for name in ("mine_for_recipes:double", "mine_for_recipes.py:double", f"{tmp_path}/mine_for_recipes.py:double"):
        assert load_function(name)(4) == 8
    assert load_function("mine_for_recipes.py:Judge.score")(3) == 3
    assert load_function("mine_for_recipes.py:double") is load_function("mine_for_recipes.py:double")
    for name, message in (
        ("mine_for_recipes.py:duoble", "has no 'duoble': did you mean 'double'?"),
        ("mine_for_recipes.py:limit", "is a int, and not a function"),
        ("missing.py:f", "there is no file missing.py"),
        ("no_such_module_of_mine:f", "there is no module 'no_such_module_of_mine'"),
        ("double", "expected 'module:function'"),
    ):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            load_function(name)


def test_an_error_of_the_module_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_function(f"{tmp_path}/broken.py:f")


def test_name_of_a_function_leads_back_to_it() -> None:
    name = function_name(reward)
    assert name is not None
    assert load_function(name) is reward
    assert function_name(lambda row, answer: 0.0) is None


def completion(*tokens: int) -> Completion:
    return Completion(tokens, (0.0,) * len(tokens), (0,) * len(tokens), "stop")


def text(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def prompt(row: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": row["q"]}]


ROW, TALK = {"q": "hi"}, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]


def test_rewards_get_the_text_and_if_they_ask_the_conversation() -> None:
    seen: list[Any] = []

    def plain(row: Any, answer: str) -> float:
        seen.append((row, answer))
        return 1.0

    def full(row: Any, answer: str, messages: Any) -> float:
        seen.append((row, answer, messages))
        return 2.0

    async def slow(row: Any, answer: str) -> float:
        seen.append((row, answer))
        return 3.0

    for answered in (completion(97, 98), TALK):
        assert answer_reward(plain, text, prompt)(ROW, answered) == 1.0
        assert answer_reward(full, text, prompt)(ROW, answered) == 2.0
        assert asyncio.run(answer_reward(slow, text, prompt)(ROW, answered)) == 3.0
    assert seen == [(ROW, "ab"), (ROW, "ab", TALK), (ROW, "ab")] * 2


@pytest.mark.parametrize("wrong", [lambda answer: 0.0, lambda a, b, c, d: 0.0, 3])
def test_rewards_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="reward = "):
        answer_reward(wrong, text, prompt)


def test_rewards_of_the_library_are_taken() -> None:
    calls: list[Any] = []

    class Judge:
        async def __call__(self, item: Any, answer: Any) -> float:
            calls.append((item, answer))
            return 0.5

        def close(self) -> None:
            calls.append("closed")

    judged = answer_reward(Judge(), text, prompt)
    assert asyncio.run(judged(ROW, TALK)) == 0.5
    judged.close()
    assert calls == [(ROW, "ab"), "closed"]
