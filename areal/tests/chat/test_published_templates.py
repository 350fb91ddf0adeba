"""Every chat template in TRL's package: prompts, masks, calls and extended turns, token by token."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from areal.chat import Chat, ParsedAnswer, ToolCall
from areal.tests.harness.world import record
from areal.tests.unit.chat.agents import TOOLS, USER, answer_of, sampled
from areal.tests.unit.chat.tokenizers import chat_tokenizer

if find_spec("trl") is None:
    pytest.skip(
        "the package of TRL, which has the templates, is not installed: make test-templates", allow_module_level=True
    )

FOLDER = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr,index]
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
SYSTEM = {"role": "system", "content": "Be nice."}
MORE = {"role": "user", "content": "More?"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER, {"role": "assistant", "content": "Four."}],
    "a system": [SYSTEM, USER, {"role": "assistant", "content": "Four."}],
    "several turns": [USER, {"role": "assistant", "content": "Four."}, MORE, {"role": "assistant", "content": "Six."}],
    "reasoning": [USER, {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}],
}
CALLS = {
    "glm4moe", "gptoss", "llama3_1", "llama3_2", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
    "qwen3_8", "qwen3_instruct_2507", "qwen3_vl",
}  # fmt: skip
"""Templates whose calls are learned."""
HEADERS = ("assistant", "model", "<|im_start|>", "<start_of_turn>", "<|turn>", "user", "User")


def chat_of(name: str, *tools: Any) -> Chat:
    return Chat(chat_tokenizer((FOLDER / f"{name}.jinja").read_text()), tools)


def allowed(work: Callable[[], Any], refusal: str) -> Any:
    """Return a result, or ``None`` for an error with these words."""
    try:
        return work()
    except ValueError as error:
        if refusal in str(error):
            return None
        raise


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_template(name: str) -> None:
    """Prompts and finished conversations; or the template's refusal, or the refusal of an answer that it changes."""
    chat, done = chat_of(name), []
    apply = chat.template.tokenizer.apply_chat_template
    for what, messages in CONVERSATIONS.items():
        text = allowed(lambda m=messages: chat.template.text(m), "refuses messages")
        if text is None:
            continue
        prompt = messages[: -1 if messages[-1]["role"] == "assistant" else None]
        if not chat.template._parts:
            assert chat.prompt(prompt) == apply(prompt, add_generation_prompt=True, return_dict=False)
        segments = allowed(lambda m=messages: chat.segments(m), "no prompt leads to this answer")
        if segments is None:
            continue
        assert [token for each in segments for token in each.tokens] == chat.template.ids(text)
        for each in segments:
            trained = chat.template.tokenizer.decode(each.tokens)
            if each.trainable:
                assert trained.rstrip() == trained
                assert "Four." in trained or "Six." in trained
                assert not trained.startswith(HEADERS)
                assert sum(token in chat.stop_token_ids for token in each.tokens) <= 1
        done.append(what)
    record("published chat templates", name, equal=len(done), calls="yes" if name in CALLS else "no")
    assert done or name in ("deepseek_r1_distill", "deepseekv3", "llava_next")


@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls_are_parsed_and_results_extend_the_conversation(name: str) -> None:
    chat = chat_of(name, *TOOLS)
    call = ToolCall("forecast", {"city": "Oslo", "days": 3, "hourly": True}, "call00001")
    reasoning = "I wonder." if chat._format.closings else None
    talk = chat.start([USER])
    answer = talk.answer(sampled(answer_of(chat, ParsedAnswer("", reasoning, (call,)).message())))
    assert [(each.name, each.arguments) for each in answer.tool_calls] == [(call.name, call.arguments)]
    assert (answer.content, answer.reasoning, answer.errors) == ("", reasoning, ())
    talk.add({**answer.tool_calls[0].result("sun"), "tool_call_id": "call00001"})
    assert talk.tokens == chat.template.ids(chat.template.text(talk.messages, prompt=True))


@pytest.mark.parametrize("name", sorted({*NAMES} - CALLS - {"deepseekv3"}))
def test_calls_of_other_templates_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="its calls are not rendered, or in a form that was not learned"):
        chat_of(name, *TOOLS)
