"""Problems as a model sees them: in its chat template, with the answer and the end of its turn to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks import Problem
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal.utils.data import Segment, from_segments


class ChatFormat:
    """Renders problems for one tokenizer.

    Plain text is instruction, question and ``Answer:``, closed by the end-of-sequence token. A tokenizer without a chat
    template (a base model's) gets that in any case.

    Args:
        tokenizer: of the model.
        system: the instruction before the question; an empty one is left out.
        plain: leave the chat template out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str, *, plain: bool = False) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.plain = plain or tokenizer.chat_template is None

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The tokens before the answer, up to where the model is to speak."""
        return self._ids(self._prompt(problem))

    def response_ids(self, problem: Problem) -> list[int]:
        """The tokens of the right answer, and the one that ends the turn.

        Raises:
            ValueError: the template does not put the answer behind the prompt.
        """
        prompt = self._prompt(problem)
        if self.plain:
            return self._ids(f" {problem.answer}{self.tokenizer.eos_token}")
        whole = self._render(
            [*self._messages(problem), {"role": "assistant", "content": problem.answer}], generate=False
        )
        if not whole.startswith(prompt):
            raise ValueError(
                f"the chat template writes an answered question as {whole!r}, which does not begin with the question's "
                f"own {prompt!r}: use a model whose template does"
            )
        # Templates put a line break between turns; the model never has to write it.
        return self._ids(whole[len(prompt) :].rstrip())

    def sample(self, problem: Problem) -> dict[str, Tensor]:
        """One training sample, ``[S]`` per key, whose loss mask covers the answer and the end of the turn."""
        prompt = Segment(tokens=self.prompt_ids(problem), trainable=False)
        return from_segments([prompt, Segment(tokens=self.response_ids(problem), trainable=True)])

    def samples(self, problems: Sequence[Problem]) -> list[dict[str, Tensor]]:
        """One training sample for each problem."""
        return [self.sample(problem) for problem in problems]

    def end_of_turn(self, problem: Problem) -> int:
        """The token that ends the model's turn, at which generation stops."""
        return self.response_ids(problem)[-1]

    def text(self, ids: Sequence[int]) -> str:
        """What the model said, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": problem.question}]

    def _prompt(self, problem: Problem) -> str:
        if self.plain:
            return "\n".join(line for line in (self.system, problem.question, "Answer:") if line)
        return self._render(self._messages(problem), generate=True)

    def _render(self, messages: list[dict[str, str]], *, generate: bool) -> str:
        # Templates that know thinking close it at once, so that the answer stands right behind the prompt; others
        # ignore the word.
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, enable_thinking=False
        )
        return str(text)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
