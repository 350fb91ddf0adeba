"""What rows mean, and their tokens by a chat template and as plain text."""

from typing import Any

import pytest

from areal.chat import Chat
from areal.recipes.data.formats import check_rows, finished_messages, pair_messages, pair_of, prompt_messages
from areal.recipes.data.rows import read_rows
from areal.recipes.data.text import Text
from areal.tests.harness.recipes.character_tokenizer import character_tokenizer

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?"},
        {"question": "1+1?", "answer": "2"},
        {"prompt": [USER]},
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
    ],
)
def test_prompts(row: Any) -> None:
    assert prompt_messages(row) == [USER]
    assert prompt_messages(row, "Be short.") == [SYSTEM, USER]


def test_a_row_keeps_its_own_system_message() -> None:
    row = {"messages": [{"role": "system", "content": "mine"}, USER, ANSWER]}
    assert prompt_messages(row, "Be short.")[0]["content"] == "mine"
    assert finished_messages(row, "Be short.")[0]["content"] == "mine"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "completion": "2"},
        {"question": "1+1?", "answer": "2"},
        {"prompt": [USER], "response": [ANSWER]},
        {"messages": [USER, ANSWER]},
    ],
)
def test_conversations(row: Any) -> None:
    assert finished_messages(row) == [USER, ANSWER]


def test_pairs() -> None:
    wrong = {"role": "assistant", "content": "3"}
    expected = ([USER, ANSWER], [USER, wrong])
    assert pair_messages({"prompt": "1+1?", "chosen": "2", "rejected": "3"}) == expected
    assert pair_messages({"prompt": [USER], "chosen": [ANSWER], "rejected": [wrong]}) == expected
    assert pair_messages({"chosen": [USER, ANSWER], "rejected": [USER, wrong]}) == expected
    # Whole conversations beside their prompt.
    assert pair_messages({"prompt": "1+1?", "chosen": [USER, ANSWER], "rejected": [USER, wrong]}) == expected
    with pytest.raises(ValueError, match="does not begin with the prompt: leave the prompt out"):
        pair_messages({"prompt": "1+2?", "chosen": [USER, ANSWER], "rejected": [USER, wrong]})
    chat = Chat(character_tokenizer())
    pair = pair_of(chat, {"chosen": [USER, ANSWER], "rejected": [USER, wrong]})
    assert pair.prompt == chat.prompt([USER])
    decode = chat.template.tokenizer.decode
    assert [decode(its) for its in (pair.chosen, pair.rejected)] == ["2<|im_end|>", "3<|im_end|>"]
    other = {"role": "user", "content": "2+2?"}
    with pytest.raises(ValueError, match="differ before their last message"):
        pair_of(chat, {"chosen": [USER, ANSWER], "rejected": [other, wrong]})


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (
            "prompts",
            {"text": "a"},
            r"list, row 1: the row has the columns \['text'\], and needs 'messages', or 'prompt'",
        ),
        ("sft", {"prompt": "a"}, "needs 'messages', or 'prompt' or 'question' with 'completion'"),
        ("sft", {"messages": [USER]}, "no message of the role 'assistant'"),
        ("pairs", {"prompt": "a", "chosen": "b"}, "needs 'chosen' and 'rejected'"),
        ("prompts", {"messages": [ANSWER]}, "no message before the answer"),
        ("prompts", {"messages": [{"role": "user"}]}, r"messages\[0\] = .*: a message has content or tool calls"),
        ("prompts", {"messages": ["hello"]}, r"messages\[0\] = 'hello': expected a message such as"),
        ("prompts", {"prompt": 3}, "prompt is a int: expected a string or a list of messages"),
    ],
)
def test_first_wrong_row_is_named(kind: str, row: Any, message: str) -> None:
    right = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    check_rows(read_rows([right, right]), kind)
    with pytest.raises(ValueError, match=message):
        check_rows(read_rows([right, row, right]), kind)


def test_plain_text_is_tokenised_apart_and_trains_the_answer_and_its_end() -> None:
    tokenizer = character_tokenizer()
    text = Text(tokenizer)
    prompt = text.prompt([SYSTEM, USER])
    assert tokenizer.decode(prompt) == "Be short.\n1+1?"
    sample = text.sample([SYSTEM, USER, ANSWER])
    assert sample["input_ids"][: len(prompt)].tolist() == prompt
    # A value of a token is at the position before it.
    trained = sample["input_ids"][1:][sample["loss_mask"][:-1] != 0].tolist()
    assert trained == [*tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    assert text.parse(trained).content == "2"
    assert text.parse(trained).complete
    assert not text.parse(trained[:-1]).complete
    with pytest.raises(ValueError, match="plain text has one answer, at the end"):
        text.sample([USER, ANSWER, USER, ANSWER])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        Text(tokenizer)
