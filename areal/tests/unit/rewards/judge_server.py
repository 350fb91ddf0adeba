"""A server of chat completions that fails in stated ways."""

from __future__ import annotations

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from areal.tests.harness.limits import PROMPTLY

Fault = int | str | dict[str, Any] | tuple[int, dict[str, str]]
"""A status; ``"drop"`` the connection; ``"hang"`` until the server closes; a body; a status with headers."""


def reply(text: Any) -> dict[str, Any]:
    """Return the body of a reply."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


class JudgeServer:
    """A server on a free port. The first requests meet the given faults, others get ``text``.

    Attributes:
        bodies, headers: of all requests.
        most: largest number of requests at once.
        meeting: requests wait for each other there, if it is set.
    """

    def __init__(self, *faults: Fault, text: str = "Score: 0.5") -> None:
        self.faults, self.text = deque(faults), text
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most, self._now, self._lock = 0, 0, threading.Lock()
        self.meeting: threading.Barrier | None = None
        self._end = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner._answer(self)

            def log_message(self, *_: Any) -> None:
                """Keep the output of tests clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> JudgeServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])))
        with self._lock:
            self.bodies.append({"path": request.path, **body})
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self._now += 1
            self.most = max(self.most, self._now)
            fault = self.faults.popleft() if self.faults else None
        if self.meeting is not None:
            self.meeting.wait(PROMPTLY)
        if fault == "hang":
            self._end.wait(2 * PROMPTLY)
        # Before the reply, after which the next request may come.
        with self._lock:
            self._now -= 1
        if isinstance(fault, str):
            request.close_connection = True
            return
        status, headers = fault if isinstance(fault, tuple) else (fault if isinstance(fault, int) else 200, {})
        content = json.dumps(
            fault if isinstance(fault, dict) else reply(self.text) if status == 200 else {"error": "stated"}
        )
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content.encode())
