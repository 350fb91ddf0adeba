"""The form of tool calls in answers, learned from a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from areal.chat.answer import ParsedCalls, ToolCall
from areal.chat.parameters import Types, read_value
from areal.chat.template import Template, common, cut

NAMES, KEYS, VALUES, ID = ("xnameax", "xnamebx"), ("xkeyax", "xkeybx"), ("xvalueax", "xvaluebx"), "callx0001"
"""Texts that no template contains, for two calls."""


class Core(Protocol):
    """The text of a call between the delimiters of calls.

    Attributes:
        shows_end: True if text that is cut has another form. Otherwise the delimiter behind a call shows that it is whole.
    """

    shows_end: ClassVar[bool]

    def read(self, text: str, types: Types) -> tuple[ToolCall, int]:
        """Read a call at the start of a text. Returns it and the length of its text.

        Raises:
            ValueError: the text has another form.
        """


@dataclass(frozen=True)
class ObjectCore:
    """A JSON object with a name and arguments."""

    shows_end: ClassVar[bool] = True
    name: str
    arguments: str
    id: str | None

    def read(self, text: str, types: Types) -> tuple[ToolCall, int]:
        """See :class:`Core`."""
        found, length = json.JSONDecoder().raw_decode(text)
        if not isinstance(found, dict) or not isinstance(found.get(self.name), str):
            raise ValueError(f"it must be an object with {self.name!r} and {self.arguments!r}")
        return ToolCall(
            found[self.name], _arguments(found.get(self.arguments, {})), str(found.get(self.id or "", ""))
        ), length


@dataclass(frozen=True)
class NamedCore:
    """A name, and a JSON object with arguments."""

    shows_end: ClassVar[bool] = True
    middle: str

    def read(self, text: str, types: Types) -> tuple[ToolCall, int]:
        """See :class:`Core`."""
        match = re.match(rf"\s*([\w.\-]+){_loose(self.middle)}(?=\{{)", text)
        if match is None:
            raise ValueError("it must be the name of a tool and a JSON object")
        found, length = json.JSONDecoder().raw_decode(text[match.end() :])
        return ToolCall(match[1], _arguments(found)), match.end() + length


@dataclass(frozen=True)
class PairsCore:
    """A name, and pairs of parameter and value in tags. White space within the tags is part of a value, but for the template's own."""

    shows_end: ClassVar[bool] = False
    lead: str
    before: str
    between: str
    after: str
    json_strings: bool

    def read(self, text: str, types: Types) -> tuple[ToolCall, int]:
        """See :class:`Core`."""
        name = re.match(rf"\s*([\w.\-]+)(?:{_loose(self.lead)})?", text)
        if name is None:
            raise ValueError("it must begin with the name of a tool")
        between, after = self.between.rstrip(), self.after.lstrip()
        value = (
            rf"{_loose(between)}(?:{re.escape(self.between[len(between) :])})?(?P<value>.*?)"
            rf"(?:{re.escape(self.after[: len(self.after) - len(after)])})?{_loose(after)}"
        )
        pair = re.compile(rf"{_loose(self.before)}(?P<key>[\w.\-]+){value}", re.DOTALL)
        arguments: dict[str, Any] = {}
        place = name.end()
        while match := pair.match(text, place):
            kinds = types.get(name[1], {}).get(match["key"], frozenset())
            arguments[match["key"]] = read_value(match["value"], kinds, self.json_strings)
            place = match.end()
        return ToolCall(name[1], arguments), place


@dataclass(frozen=True)
class CallFormat:
    """Delimiters and text of calls.

    Attributes:
        first: text before the first call; empty if a call is all of an answer.
        start: text before each further call; empty if an answer has one call.
        end: text behind each call.
        last: text behind the last call, and behind ``end``.
    """

    first: str
    start: str
    end: str
    last: str
    core: Core

    def parse(self, text: str, types: Types) -> ParsedCalls:
        """Return the calls in a text. What cannot be parsed is part of ``rest``."""
        calls, kept = ParsedCalls(), 0
        alone = not self.first.strip()
        match = re.match(r"\s*(?=\{)", text) if alone else re.search(_loose(self.first), text)
        while match is not None:
            begin, place = match.span()
            try:
                call, length = self.core.read(text[place:], types)
                behind = self._end(text, place + length)
            except (ValueError, RecursionError) as error:
                if not alone:
                    calls.errors.append(f"{text[begin : begin + 200]!r}: {error}")
            else:
                calls.rest += text[kept:begin]
                calls.calls.append(call)
                kept = place = behind
            match = re.compile(_loose(self.start)).search(text, place) if self.start.strip() else None
        calls.rest += text[kept:]
        return calls

    def _end(self, text: str, place: int) -> int:
        """Return the place behind the delimiters that follow a call.

        Raises:
            ValueError: there is none, and only they show that the call is whole.
        """
        delimiters = [delimiter for delimiter in (self.end, self.last) if delimiter.strip()]
        begin = place
        for delimiter in delimiters:
            behind = re.compile(r"\s*" + _loose(delimiter)).match(text, place)
            place = behind.end() if behind else place
        further = self.start.strip() and re.compile(r"\s*" + _loose(self.start)).match(text, place)
        if delimiters and place == begin and not further and not self.core.shows_end:
            raise ValueError(f"behind its parameters must be {delimiters[0].strip()!r}")
        return place


def learn(template: Template, header: str, stops: list[str]) -> CallFormat | None:
    """Return the form in which a template renders calls; ``None`` if it renders none, or in no form that is known here.

    Args:
        template: renders answers with known calls.
        header: text before content, without reasoning.
        stops: texts that end an answer.
    """

    def render(*calls: dict[str, str]) -> str:
        made = [
            ToolCall(name, values, f"{ID[:-1]}{i}") for i, (name, values) in enumerate(zip(NAMES, calls, strict=False))
        ]
        return template.answered({"tool_calls": [call.message() for call in made]}) or ""

    one, other = ({key: value} for key, value in zip(KEYS, VALUES, strict=True))
    text, pairs, both = render(one), render(one | other), render(one, other)
    if NAMES[0] not in text or VALUES[0] not in text:
        return None
    for find in (_find_object, _find_named, _find_pairs):
        found = find(text, pairs)
        if found is None:
            continue
        core, begin, end = found
        tail = cut(text[end:], stops)
        opening = text[:begin].removeprefix(header)
        second = find(both[end:], "") if NAMES[1] in both and both.startswith(text[:end]) else None
        if second is None:
            return CallFormat(opening, "", tail, "", core)
        separator = both[end : end + second[1]]
        start = _common_suffix(opening, separator)
        start = start if start.strip() else separator
        # Between two calls are the end of one and the start of the other.
        end_of_each = separator.removesuffix(start)
        each = len(end_of_each) if tail.startswith(end_of_each) else 0
        return CallFormat(opening, start, tail[:each], tail[each:], core)
    return None


def _find_object(text: str, _: str) -> tuple[Core, int, int] | None:
    name = next((n for n in NAMES if n in text), None)
    for match in re.finditer(r"\{", text[: text.index(name)] if name else ""):
        try:
            found, length = json.JSONDecoder().raw_decode(text[match.start() :])
        except ValueError:
            continue
        if not isinstance(found, dict) or name not in found.values():
            continue
        keys = {key: value for key, value in found.items() if "xkey" in str(value)}
        given = next((key for key, value in found.items() if str(value).startswith(ID[:-1])), None)
        named = next(key for key, value in found.items() if value == name)
        if keys:
            return ObjectCore(named, next(iter(keys)), given), match.start(), match.start() + length
    return None


def _find_named(text: str, _: str) -> tuple[Core, int, int] | None:
    name = next((n for n in NAMES if n in text), None)
    if name is None:
        return None
    begin = text.index(name)
    for match in re.finditer(r"\{", text[begin:]):
        brace = begin + match.start()
        try:
            found, length = json.JSONDecoder().raw_decode(text[brace:])
        except ValueError:
            continue
        if isinstance(found, dict) and set(found) <= set(KEYS) and found:
            return NamedCore(text[begin + len(name) : brace]), begin, brace + length
    return None


def _find_pairs(text: str, pairs: str) -> tuple[Core, int, int] | None:
    """Find ``name before key between value after``, where ``after`` is learned from a call with two parameters."""
    index = next((i for i, n in enumerate(NAMES) if n in text), None)
    if index is None or KEYS[index] not in text or VALUES[index] not in text:
        return None
    name, key, value = NAMES[index], KEYS[index], VALUES[index]
    at_key, at_value = text.index(key), text.index(value)
    begin = text.rindex(name, 0, at_key)
    before, between = text[begin + len(name) : at_key], text[at_key + len(key) : at_value]
    if not pairs:
        return PairsCore("", before, between, "", False), begin, at_value + len(value)
    gap = pairs[pairs.index(VALUES[0]) + len(VALUES[0]) : pairs.index(KEYS[1])]
    opening = _common_suffix(before, gap)
    after = gap[: len(gap) - len(opening)]
    if not after.strip():
        return None
    quoted = between.endswith('"')
    between, after = (between[:-1], after.removeprefix('"')) if quoted else (between, after)
    end = at_value + len(value) + quoted + len(after)
    return PairsCore(before[: len(before) - len(opening)], opening, between, after, quoted), begin, end


def _arguments(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError(f"arguments must be an object, not {found!r}")
    return found


def _common_suffix(one: str, other: str) -> str:
    return one[len(one) - common(one[::-1], other[::-1]) :]


def _loose(text: str) -> str:
    """Return a pattern of a text in which any white space matches any other, or none."""
    return r"\s*".join(re.escape(word) for word in re.split(r"\s+", text))


Parser = Callable[[str], ParsedCalls]
"""Function from the text of an answer to its calls."""
