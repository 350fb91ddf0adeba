"""A new kind of server: its requests and replies in a module, and its name among those of ``areal.inference``."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pkgutil
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import areal.inference.http.servers as server_modules
from areal.inference import HTTPRollout, Sampling
from areal.inference.http.servers.dialect import Dialect, Routes
from areal.inference.http.servers.group_routes import GroupRoutes
from areal.tests.unit.patches.patching import Patch

MODULE, LIST = "areal/inference/http/servers/plain.py", "areal/inference/__init__.py"
PATCH = Patch(
    {
        MODULE: '''"""Plain servers, which generate and load directories."""

from collections.abc import Sequence

from areal.inference.http.servers.http_call import Anything, Empty, LogProb, ReplyBody, RequestBody, TokenId
from areal.inference.http.servers.http_call import HTTPCall
from areal.inference.http.servers.dialect import Ask, PauseRoutes, ReplyPart, ServedModel, expect
from areal.inference.protocol import Sampling


class PlainRequest(RequestBody):
    """``POST /generate``."""

    tokens: list[TokenId]
    length: int
    seed: int


class PlainReply(ReplyBody):
    """Its reply."""

    tokens: list[TokenId]
    logprobs: list[LogProb]


class PlainLoad(RequestBody):
    """``POST /load``."""

    folder: str


class Plain:
    """Plain servers. They draw at temperature 1."""

    adapter = group = None

    def check(self, sampling: Sampling) -> None:
        if sampling.temperature != 1:
            raise ValueError(f"Sampling.temperature = {sampling.temperature}: plain servers draw at 1")

    async def examine(self, ask: Ask) -> "PlainRoutes":
        return PlainRoutes()


class PlainRoutes:
    """Requests of one plain server."""

    served = ServedModel()
    pauses = PauseRoutes(*(HTTPCall(route, Empty(), Anything) for route in ("/pause", "/pause", "/resume")))
    labels = sleeps = None

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[PlainReply]:
        body = PlainRequest(tokens=list(prompt), length=sampling.max_new_tokens - generated, seed=seed)
        return HTTPCall("/generate", body, PlainReply)

    def read_reply(self, reply: ReplyBody, sampling: Sampling) -> ReplyPart:
        drawn = expect(PlainReply, reply)
        return ReplyPart(tuple(drawn.tokens), tuple(drawn.logprobs), "length")

    def abort(self, name: str) -> None:
        return None

    def load(self, folder: str, label: str) -> Sequence[HTTPCall[ReplyBody]]:
        return [HTTPCall("/load", PlainLoad(folder=folder), Anything)]
''',
        LIST: {
            "from areal.inference.http.rollout import HTTPRollout as HTTPRollout": (
                "    from areal.inference.http.servers.plain import Plain as Plain\n"
            ),
            '"LocalRollout": "areal.inference.local.rollout",': '    "Plain": "areal.inference.http.servers.plain",\n',
        },
    }
)
INTERFACES: dict[str, type] = {"GroupRoutes": GroupRoutes, "Routes": Routes}
"""Ends of the names of classes, each with the interface that they implement."""


class PlainServer(BaseHTTPRequestHandler):
    """A server of the new kind: it answers with the numbers after the prompt's last token."""

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            new = list(range(asked["tokens"][-1] + 1, asked["tokens"][-1] + 1 + asked["length"]))
            return self.answer({"tokens": new, "logprobs": [-0.5] * len(new)})
        return self.answer({}, 200 if self.path in ("/pause", "/resume", "/load") else 404)

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlainServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def defined(module: ModuleType) -> list[type]:
    """Return the classes that a module defines."""
    return [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]


def kinds(module: ModuleType) -> list[type]:
    """Return the kinds of servers that a module defines: classes whose ``examine`` returns the requests of a server."""
    return [each for each in defined(module) if hasattr(each, "examine")]


def to_edit(module: ModuleType) -> Iterator[str]:
    """Yield a line for each kind of server that ``areal.inference`` does not list, and for each missing member."""
    package, file = sys.modules["areal.inference"], f"{module.__name__.replace('.', '/')}.py"
    for kind in kinds(module):
        if package._HOMES.get(kind.__name__) != module.__name__ or kind.__name__ not in package.__all__:
            yield f"{kind.__name__} of {module.__name__}: add it to _HOMES and __all__ in {LIST}"
        for member in missing(Dialect, kind):
            yield f"{kind.__name__}.{member}: define it in {file}, as Dialect describes it"
    for each in defined(module):
        interface = next((INTERFACES[end] for end in INTERFACES if each.__name__.endswith(end)), None)
        for member in [] if interface is None else missing(interface, each):
            yield f"{each.__name__}.{member}: define it in {file}, as {interface.__name__} describes it"


def missing(interface: type, implementation: type) -> list[str]:
    """Return the members of an interface that are neither in a class nor set in its constructor."""
    sources = [inspect.getsource(each) for each in implementation.__mro__[:-1]]
    there = {*dir(implementation), *(name for source in sources for name in re.findall(r"self\.(\w+) = ", source))}
    there |= {
        name for source in sources for names in re.findall(r"self\.(\w+), self\.(\w+) = ", source) for name in names
    }
    return sorted(name for name in vars(interface) if not name.startswith("_") and name not in there)


def test_kinds_of_servers_are_listed_and_complete() -> None:
    modules = [
        importlib.import_module(f"{server_modules.__name__}.{each.name}")
        for each in pkgutil.iter_modules(server_modules.__path__)
        if each.name not in ("dialect", "group_routes")
    ]
    assert sum(len(kinds(each)) for each in modules) >= 2
    assert [line for each in modules for line in to_edit(each)] == []


def test_a_kind_of_server_needs_two_source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    PATCH.apply(tmp_path, monkeypatch)
    assert list(to_edit(sys.modules["areal.inference.http.servers.plain"])) == []
    plain = sys.modules["areal.inference"].Plain()
    rollout = HTTPRollout(url, plain, folder=tmp_path / "weights")
    try:
        answer = asyncio.run(rollout.generate([5, 6], Sampling(max_new_tokens=3)))
        assert (answer.tokens, answer.logprobs, answer.finish_reason) == ((7, 8, 9), (-0.5,) * 3, "length")
        with pytest.raises(ValueError, match="plain servers draw at 1"):
            asyncio.run(rollout.generate([5, 6], Sampling(temperature=0.5)))
    finally:
        rollout.close()
    assert len(PATCH.files) <= 3


def test_a_kind_of_server_that_is_not_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PATCH.without(LIST).apply(tmp_path, monkeypatch)
    (line,) = to_edit(sys.modules["areal.inference.http.servers.plain"])
    assert line.startswith("Plain of areal.inference.http.servers.plain: ")
    assert line.endswith("areal/inference/__init__.py")


@pytest.mark.parametrize(
    ("member", "line"),
    [
        ("    def check(", f"Plain.check: define it in {MODULE}, as Dialect describes it"),
        ("    def abort(", f"PlainRoutes.abort: define it in {MODULE}, as Routes describes it"),
    ],
)
def test_a_member_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, line: str
) -> None:
    text = str(PATCH.files[MODULE])
    assert text.count(member) == 1
    Patch({MODULE: text.replace(member, member.replace("def ", "def its_"))}).apply(tmp_path, monkeypatch)
    assert line in to_edit(sys.modules["areal.inference.http.servers.plain"])
