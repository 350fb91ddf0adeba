"""The form of tool calls in answers, learned from a chat template."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from areal.chat.answer import ParsedCalls, ToolCall
from areal.chat.template import Template, common, cut

NAMES, KEYS, VALUES, ID = ("xnameax", "xnamebx"), ("xkeyax", "xkeybx"), ("xvalueax", "xvaluebx"), "callx0001"
"""Texts that no template contains, for two calls."""

Types = dict[str, dict[str, str]]
"""JSON types of the parameters of each tool."""


class Core(Protocol):
    """The text of a call between the delimiters of calls."""

    def read(self, text: str, types: Types) -> tuple[ToolCall, int]:
        """Read a call at the start of a text. Returns it and the length of its text.

        Raises:
            ValueError: the text has another form.
        """


@dataclass(frozen=True)
class ObjectCore:
    """A JSON object with a name and arguments."""

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
    """A name, and pairs of parameter and value in tags."""

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
        pair = re.compile(
            rf"{_loose(self.before)}(?P<key>[\w.\-]+){_loose(self.between)}(?P<value>.*?){_loose(self.after)}",
            re.DOTALL,
        )
        arguments: dict[str, Any] = {}
        place = name.end()
        while match := pair.match(text, place):
            kind = types.get(name[1], {}).get(match["key"])
            plain = kind == "string" and not self.json_strings
            arguments[match["key"]] = match["value"] if plain else _value(match["value"], kind)
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
            except (ValueError, RecursionError) as error:
                if not alone:
                    calls.errors.append(f"{text[begin : begin + 200]!r}: {error}")
            else:
                calls.rest += text[kept:begin]
                calls.calls.append(call)
                place += length
                for delimiter in (self.end, self.last):
                    behind = re.compile(_loose(delimiter)).match(text, place) if delimiter.strip() else None
                    place = behind.end() if behind else place
                kept = place
            match = re.compile(_loose(self.start)).search(text, place) if self.start.strip() else None
        calls.rest += text[kept:]
        return calls


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


def _value(text: str, kind: str | None) -> Any:
    """Return a value of a JSON type, written as JSON or with Python's constants. Text that is neither is a string."""
    constants = {"True": True, "False": False, "None": None}
    if text.strip() in constants:
        return constants[text.strip()]
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if kind not in (None, "string"):
        raise ValueError(f"a parameter of the type {kind} has the value {text[:100]!r}")
    return text


def _common_suffix(one: str, other: str) -> str:
    return one[len(one) - common(one[::-1], other[::-1]) :]


def _loose(text: str) -> str:
    """Return a pattern of a text in which any white space matches any other, or none."""
    return r"\s*".join(re.escape(word) for word in re.split(r"\s+", text))


Parser = Callable[[str], ParsedCalls]
"""Function from the text of an answer to its calls."""
