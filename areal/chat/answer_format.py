"""The form of answers, learned from a chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace

from areal.chat.answer import ParsedAnswer, ToolCall
from areal.chat.call_format import CallFormat, learn
from areal.chat.parameters import Types
from areal.chat.template import CALL, MARK, Template, common, cut

REASON = "XREASONX"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class AnswerFormat:
    """Delimiters of an answer's reasoning, content and calls.

    Attributes:
        header: text before content without reasoning.
        footer: text between content and the end-of-turn token.
        opening: text before the reasoning. Empty if it is part of the prompt.
        closings: texts behind the reasoning: before content, and before anything. Empty if the template has no place for reasoning.
        calls: the form of calls; ``None`` without calls.
    """

    header: str
    footer: str
    opening: str
    closings: tuple[str, ...]
    calls: CallFormat | None

    @classmethod
    def of(cls, template: Template) -> AnswerFormat:
        """Learn the form from answers with known content."""
        tokenizer = template.tokenizer
        stops = [str(tokenizer.convert_ids_to_tokens(token)) for token in template.stop_token_ids]
        plain = template.answered({"content": MARK}) or MARK
        header, _, footer = plain.partition(MARK)
        footer = cut(footer, stops) if any(stop in footer for stop in stops) else ""
        opening = ""
        closings: tuple[str, ...] = ()
        for field in REASONING_FIELDS:
            text = template.answered({"content": MARK, field: REASON}, exact=True)
            if text is None or REASON not in text or MARK not in text:
                continue
            begin = text.index(REASON)
            opening, closing = text[:begin], text[begin + len(REASON) : text.index(MARK)]
            closings = (closing,)
            calling = template.answered({field: REASON, "tool_calls": [CALL.message()]})
            if calling is not None and REASON in calling:
                behind = calling[calling.index(REASON) + len(REASON) :]
                closings = (closing, closing[: common(closing, behind)])
            break
        closings = tuple(each.strip() for each in closings if each.strip())
        form = cls(header, footer, opening, closings, learn(template, header, stops))
        return form if form._reads_calls(template, stops) else replace(form, calls=None)

    def _reads_calls(self, template: Template, stops: list[str]) -> bool:
        """Return True if an answer with a call is parsed to this call."""
        call = ToolCall("xname", {"xone": "xtext", "xtwo": 3}, "call00001")
        text = template.answered(ParsedAnswer("", tool_calls=(call,)).message())
        if text is None:
            return False
        types = {"xname": {"xone": frozenset({"string"}), "xtwo": frozenset({"integer"})}}
        found = self.parse(cut(text, stops), types, complete=True)
        return not found.content and [(x.name, x.arguments) for x in found.tool_calls] == [(call.name, call.arguments)]

    def parse(self, text: str, types: Types, *, complete: bool) -> ParsedAnswer:
        """Parse the text of an answer without its end-of-turn token."""
        reasoning, rest = self._split(text)
        if self.header.strip() and rest.lstrip().startswith(self.header.strip()):
            rest = rest.lstrip()[len(self.header.strip()) :]
        if self.footer.strip():
            rest = rest.rstrip().removesuffix(self.footer.strip())
        if self.calls is None:
            return ParsedAnswer(rest.strip(), reasoning, complete=complete)
        calls = self.calls.parse(rest, types)
        return ParsedAnswer(calls.rest.strip(), reasoning, tuple(calls.calls), tuple(calls.errors), complete)

    def _split(self, text: str) -> tuple[str | None, str]:
        """Return reasoning, and the text behind it."""
        if not self.closings:
            return None, text
        opening, inside = self.opening.strip(), text.lstrip()
        opened = inside.startswith(opening)
        inside = inside.removeprefix(opening)
        for closing in self.closings:
            if closing in inside:
                reasoning, _, rest = inside.partition(closing)
                return reasoning.strip() or None, rest
        # Without its end, the whole text is reasoning.
        return (inside.strip() or None, "") if opened else (None, text)
