"""Example components that need no weights: problems, chat format, verifier, and checks of a finished run."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedTokenizerFast

from areal.tests.harness.recipes.character_tokenizer import CLOSE, EXAMPLES, OPEN, UNKNOWN, character_tokenizer

NAMES = ("chat", "checks", "curves", "history", "preferences", "significance", "tasks")


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """Import the modules next to the example scripts as the scripts do, and remove them afterwards."""
    pytest.importorskip("reasoning_gym", reason="needs a C compiler to be installed, see docs/installation.md")
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield {name: __import__(name) for name in NAMES}
    finally:
        sys.path.remove(str(EXAMPLES))
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == EXAMPLES:
                del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture(scope="module")
def task(examples):
    return examples["tasks"].make_task("chain_sum", n_train=60, n_held_out=40, seed=3)


def trained_tokens(sample) -> list[int]:
    """Return the tokens that the loss trains: each is one position after its entry in the mask."""
    return [int(sample["input_ids"][t + 1]) for t in sample["loss_mask"].nonzero().flatten().tolist()]


def test_example_loss_covers_answer_and_end_of_turn(examples, tokenizer, task):
    chat = examples["chat"].ChatFormat(tokenizer, "Answer with just the number.")
    for problem in task.train:
        sample = chat.sample(problem)
        assert tokenizer.decode(trained_tokens(sample)) == problem.answer + CLOSE
        assert set(sample["loss_mask"].tolist()) == {0.0, 1.0}
        full = tokenizer.decode(sample["input_ids"])
        assert full.startswith(f"{OPEN}system\nAnswer with just the number.{CLOSE}\n{OPEN}user\n{problem.question}")
        assert full.endswith(f"{OPEN}assistant\n{problem.answer}{CLOSE}")


def test_example_generation_prompt_equals_training_prompt(examples, tokenizer, task):
    chat = examples["chat"].ChatFormat(tokenizer, "")
    problem = task.held_out[0]
    sample = chat.sample(problem)
    prompt = chat.prompt_ids(problem)
    assert sample["input_ids"][: len(prompt)].tolist() == prompt
    assert sample["loss_mask"].nonzero()[0].item() == len(prompt) - 1
    assert chat.end_of_turn(problem) == tokenizer.eos_token_id
    assert "system" not in tokenizer.decode(prompt)
    assert chat.text([*chat.response_ids(problem), tokenizer.pad_token_id]) == problem.answer


def test_example_tokenizer_without_template_uses_plain_text(examples, tokenizer, task):
    base = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token=UNKNOWN, eos_token=CLOSE)
    chat = examples["chat"].ChatFormat(base, "Be brief.")
    problem = task.train[0]
    full = base.decode(chat.sample(problem)["input_ids"])
    assert full == f"Be brief.\n{problem.question}\nAnswer: {problem.answer}{CLOSE}"
    assert base.decode(trained_tokens(chat.sample(problem))) == f" {problem.answer}{CLOSE}"


def test_example_template_that_rewrites_the_prompt_raises(examples, tokenizer, task):
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token=UNKNOWN, eos_token=CLOSE)
    other.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template"):
        examples["chat"].ChatFormat(other, "").response_ids(task.train[0])


def test_example_held_out_questions_are_not_in_training_data(examples, task):
    held_out = {problem.question for problem in task.held_out}
    assert len(held_out) == len(task.held_out) == 40
    assert len(task.train) == 60
    assert not held_out & {problem.question for problem in task.train}


def test_example_task_depends_only_on_seed(examples, task):
    make_task = examples["tasks"].make_task
    assert make_task("chain_sum", 60, 40, seed=3).train == task.train
    assert make_task("chain_sum", 30, 40, seed=3).train == task.train[:30]
    assert make_task("chain_sum", 60, 40, seed=4).train != task.train


@pytest.mark.parametrize("name", ["chain_sum", "simple_equations", "leg_counting"])
def test_example_verifier_accepts_only_correct_answers(examples, name):
    task = examples["tasks"].make_task(name, n_train=5, n_held_out=20, seed=1)
    for problem in (*task.train, *task.held_out):
        assert task.is_right(f" {problem.answer}\n", problem)
        assert not task.is_right(str(int(problem.answer) + 1), problem)
        assert not task.is_right(problem.question, problem)
        assert not task.is_right("", problem)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("no_such_data_set", {}, "no_such_data_set"),
        ("chain_sum", {"no_such_option": 1}, "no_such_option"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "max_terms"),
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "have more"),
    ],
)
def test_example_unknown_task_raises(examples, name, options, match):
    with pytest.raises(ValueError, match=match):
        examples["tasks"].make_task(name, n_train=10, n_held_out=500, seed=0, options=options)


@pytest.fixture
def history(examples):
    """Return the history of a successful run."""
    history = examples["history"].History(train_loss=[2.0, 1.0], grad_norm=[1.0, 1.0], n_tokens=[9, 9], seconds=[1, 2])
    history.held_out_loss.update({0: 2.0, 2: 1.5})
    history.accuracy.update({0: 0.0, 2: 0.25})
    history.reload_error.update({"mean": 0.01, "max": 0.1, "rounding": 0.01, "bound": 0.02, "weights": 0.0})
    return history


def test_example_successful_run_has_no_failures(examples, history):
    assert examples["checks"].failures(history, min_loss_fall=0.2, accuracy_must_rise=True) == []


@pytest.mark.parametrize(
    ("field", "wrong", "match"),
    [
        ("held_out_loss", {2: 1.7}, "held-out loss went from 2.0000 to 1.7000"),
        ("held_out_loss", {2: float("nan")}, "nan"),
        ("accuracy", {2: 0.0}, "did not rise"),
        ("reload_error", {"mean": 0.03}, "3.00e-02"),
        ("reload_error", {"mean": float("nan")}, "nan"),
        ("reload_error", {"weights": 1.0}, "1 tensors"),
    ],
)
def test_example_checks_report_measured_values(examples, history, field, wrong, match):
    getattr(history, field).update(wrong)
    (sentence,) = examples["checks"].failures(history, min_loss_fall=0.2, accuracy_must_rise=True)
    assert match in sentence


def test_example_history_round_trips_through_json_and_checkpoint(examples, history, tmp_path):
    kind = type(history)
    history.write(tmp_path / "losses.json", {"output": tmp_path})
    assert kind.read(tmp_path / "losses.json") == history
    assert json.loads((tmp_path / "losses.json").read_text())["settings"] == {"output": str(tmp_path)}
    other = kind()
    other.load_state_dict(history.state_dict())
    assert other == history
    with pytest.raises(ValueError, match=r"other\.json"):
        kind.read(tmp_path / "other.json")


def test_example_largest_difference_uses_common_steps(examples, history):
    other = type(history)(train_loss=[2.0, 1.1, 7.0])
    assert examples["checks"].largest_difference(history, other) == pytest.approx(0.1 / 1.1)


@pytest.mark.parametrize(("gained", "lost"), [(10, 0), (0, 10), (7, 3), (5, 5), (0, 0)])
def test_example_probability_of_rise_equals_enumeration(examples, gained, lost):
    before = [False] * gained + [True] * lost + [True, False] * 4
    after = [True] * gained + [False] * lost + [True, False] * 4
    ways = list(itertools.product([0, 1], repeat=gained + lost))
    expected = sum(sum(way) >= gained for way in ways) / len(ways)
    assert examples["significance"].p_value_of_rise(before, after) == pytest.approx(expected)


def test_example_preference_pairs_differ_only_in_form(examples, tokenizer):
    preferences, chat = examples["preferences"], examples["chat"].ChatFormat(tokenizer, "")
    config = preferences.PreferenceConfig(steps=3, batch_size=4, eval_size=5)
    train, held_out = preferences.make_pairs(config, chat)
    assert (len(train), len(held_out)) == (12, 5)
    for pair in (*train, *held_out):
        answer = tokenizer.decode(pair.chosen).removesuffix(CLOSE)
        assert str(int(answer)) == answer
        assert tokenizer.decode(pair.rejected) == f"The answer is {answer}.{CLOSE}"
        chosen, rejected = pair.samples(7)
        assert chosen["pair_ids"] == rejected["pair_ids"] == 7
        assert tokenizer.decode(trained_tokens(chosen)) == answer + CLOSE
        assert trained_tokens(rejected) == list(pair.rejected)


def test_example_curves_replace_steps_that_are_taken_again(examples):
    curves = examples["curves"].Curves()
    for step, scalars in [
        (2, {"a": 1.0}),
        (3, {"a": 2.0, "b": 5.0}),
        (4, {"a": 3.0}),
        (3, {"a": 4.0}),
        (4, {"b": 6.0}),
    ]:
        curves.log(step, scalars)
    missing = math.nan
    assert str(curves.values["a"]) == str([missing, 1.0, 4.0, missing])
    assert str(curves.values["b"]) == str([missing, missing, missing, 6.0])
