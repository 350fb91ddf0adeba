"""Conversion of problems to token ids: chat template, answer, and end of turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks import Problem
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal.utils.data import Segment, from_segments


class ChatFormat:
    """Renders problems for one tokenizer.

    Plain text is instruction, question and ``Answer:``, followed by the answer and the end-of-sequence token. It is also used for a
    tokenizer without a chat template (a base model's).

    Args:
        tokenizer: tokenizer of the model.
        system: instruction before the question; may be empty.
        plain: use plain text instead of the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str, *, plain: bool = False) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.plain = plain or tokenizer.chat_template is None

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Return the tokens of the prompt, up to the start of the answer."""
        return self._ids(self._prompt(problem))

    def response_ids(self, problem: Problem) -> list[int]:
        """Return the tokens of the right answer, including the token that ends the turn.

        Raises:
            ValueError: the rendered prompt is not a prefix of the rendered conversation.
        """
        prompt = self._prompt(problem)
        if self.plain:
            return self._ids(f" {problem.answer}{self.tokenizer.eos_token}")
        conversation = self._render(
            [*self._messages(problem), {"role": "assistant", "content": problem.answer}], generate=False
        )
        if not conversation.startswith(prompt):
            raise ValueError(
                f"the chat template writes an answered question as {conversation!r}, which does not begin with the question's "
                f"own {prompt!r}: use a model whose template does"
            )
        # Templates add a line break between turns, which the model does not have to generate.
        return self._ids(conversation[len(prompt) :].rstrip())

    def sample(self, problem: Problem) -> dict[str, Tensor]:
        """Return one training sample, ``[S]`` per key, whose loss mask covers the answer and the end of the turn."""
        prompt = Segment(tokens=self.prompt_ids(problem), trainable=False)
        return from_segments([prompt, Segment(tokens=self.response_ids(problem), trainable=True)])

    def samples(self, problems: Sequence[Problem]) -> list[dict[str, Tensor]]:
        """Return one training sample per problem."""
        return [self.sample(problem) for problem in problems]

    def end_of_turn(self, problem: Problem) -> int:
        """Return the token that ends the model's turn, the stop token of generation."""
        return self.response_ids(problem)[-1]

    def text(self, ids: Sequence[int]) -> str:
        """Decode an answer, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": problem.question}]

    def _prompt(self, problem: Problem) -> str:
        if self.plain:
            return "\n".join(line for line in (self.system, problem.question, "Answer:") if line)
        return self._render(self._messages(problem), generate=True)

    def _render(self, messages: list[dict[str, str]], *, generate: bool) -> str:
        # Templates with a thinking mode close it immediately, so that the answer follows the prompt; others ignore the option.
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, enable_thinking=False
        )
        return str(text)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
