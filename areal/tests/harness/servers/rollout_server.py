"""Test server with the routes of SGLang and of an older vLLM: plain transformers, one forward over the full text for each token.

``python -m areal.tests.harness.servers.rollout_server MODEL [PORT [modern]]`` prints its port. ``POST /test`` sets the faults to simulate.
With ``modern``, it has the routes of a current vLLM in place of these, and behaves as one (``vllm_routes.py``).
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import torch
from pydantic import ValidationError

from areal.inference.http.servers import vllm_schemas
from areal.tests.harness.servers.generation import Drawing
from areal.tests.harness.servers.server_state import Dead, State
from areal.tests.harness.servers.sglang_routes import SGLangRoutes
from areal.tests.harness.servers.vllm_bodies import Completion
from areal.tests.harness.servers.vllm_routes import VLLMRoutes, by_text


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    state: State
    loses_reply = False

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_call("GET", {})

    def do_POST(self) -> None:
        self.handle_call("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}"))

    def handle_call(self, method: str, body: dict[str, Any]) -> None:
        state, url = self.state, urlsplit(self.path)
        if url.path == "/test":
            return self.answer({} if method == "POST" and state.misbehave(body) is None else state.told())
        with state.changed:
            state.calls[url.path] += 1
            state.order += [url.path] if method == "POST" else []
            state.keys.add(str(self.headers["Authorization"]))
        canned = state.canned_for(url.path)
        self.loses_reply = canned is not None and canned.get("lost", False)
        if canned is not None and not self.loses_reply:
            time.sleep(canned.get("delay", 0))
            return self.raw(canned["body"].encode(), canned["status"])
        if state.modern:
            key = str(self.headers["Authorization"])
            status, content = VLLMRoutes(state).handle(method, url.path, url.query, body, key)
            if isinstance(content, str):
                return self.raw(content.encode(), status)
            return self.answer(content, status)
        try:
            answer = SGLangRoutes(state).handle(method, url.path, body)
            if answer is None:
                answer = ({}, 404) if method == "GET" else self.handle_route(url.path, body)
            return self.answer(*answer)
        except Dead:
            return self.answer({"error": "the engine has died"}, 500)
        except ValidationError as error:
            return self.answer({"detail": str(error)}, 422)
        except (OSError, ValueError) as error:
            return self.answer({"success": False, "message": str(error)}, 400)

    def handle_route(self, route: str, body: dict[str, Any]) -> tuple[Any, int]:
        """Answer as an older vLLM."""
        state = self.state
        match route:
            case "/v1/completions":
                with state.changed:
                    state.seen.append(body)
                return self.vllm(body), 200
            case "/pause":
                if urlsplit(self.path).query != "mode=abort":
                    return {"error": "mode"}, 400
                state.pause()
                return {"status": "paused"}, 200
            case "/resume":
                state.resume()
                return {"status": "resumed"}, 200
            case "/wake_up":
                state.wake()
                return None, 200
            case "/sleep":
                if urlsplit(self.path).query != "level=1":
                    return {"error": "level"}, 400
                state.sleep(keep=True)
                return None, 200
            case "/collective_rpc":
                state.load(vllm_schemas.VLLMReload.model_validate(body).kwargs.weights_path)
                return {"results": [None]}, 200
        return {"detail": "Not Found"}, 404

    def vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = Completion.model_validate(body)
        drawing = Drawing(
            name=asked.request_id,
            prompt=asked.prompt,
            length=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=[*asked.stop_token_ids, *([] if asked.ignore_eos else [self.state.own_end])],
            stop_strings=asked.stop,
            seed=asked.seed,
            by_position=False,
        )
        drawn = self.state.draw(drawing)
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": drawn.finish,
            "stop_reason": drawn.matched,
            "token_ids": drawn.tokens,
            "logprobs": {"token_logprobs": drawn.logprobs, "top_logprobs": by_text(drawn, asked)},
        }
        return {"id": asked.request_id, "object": "text_completion", "choices": [choice]}

    def answer(self, content: Any, status: int = 200) -> None:
        self.raw(json.dumps(content).encode(), status)

    def raw(self, content: bytes, status: int) -> None:
        if self.loses_reply:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""


def serve(model: str, port: int, modern: bool, ports: Connection | None = None, **options: bool) -> None:
    """Serve for ever. Sends the port, or prints it. ``options`` are those of the :class:`State`."""
    torch.set_num_threads(1)
    Handler.state = State(model, modern=modern, **options)
    server = Server(("127.0.0.1", port), Handler)
    if ports is None:
        print(server.server_address[1], flush=True)
    else:
        ports.send(server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), "modern" in sys.argv)
