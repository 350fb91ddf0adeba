"""Test server with the routes of SGLang and of vLLM: plain transformers, one forward over the full text for each token.

``python -m areal.tests.harness.servers.rollout_server MODEL [PORT [modern]]`` prints its port. ``POST /test`` sets the faults to simulate.
With ``modern``, it has the routes of a current vLLM as well, and behaves as one (``vllm_routes.py``).
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

from areal.inference.http.servers import sglang_schemas, vllm_schemas
from areal.tests.harness.servers.generation import Drawing
from areal.tests.harness.servers.server_state import Dead, State
from areal.tests.harness.servers.vllm_routes import VLLMRoutes


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
        if method == "GET":
            return self.answer(*self.handle_get(url.path))
        try:
            return self.answer(*self.handle_route(url.path, body))
        except Dead:
            return self.answer({"error": "the engine has died"}, 500)
        except ValidationError as error:
            return self.answer({"detail": str(error)}, 422)
        except (OSError, ValueError) as error:
            return self.answer({"success": False, "message": str(error)}, 400)

    def handle_get(self, route: str) -> tuple[Any, int]:
        """Answer as an older vLLM, and with ``labels`` as SGLang."""
        answers = {"/health": {}}
        if self.state.labels:
            answers["/openapi.json"] = {"paths": {"/model_info": {}, "/update_weight_version": {}, "/generate": {}}}
            answers["/model_info"] = {"model_path": self.state.path, "weight_version": self.state.label}
        return (answers[route], 200) if route in answers else ({}, 404)

    def handle_route(self, route: str, body: dict[str, Any]) -> tuple[Any, int]:
        state = self.state
        match route:
            case "/generate" | "/v1/completions":
                with state.changed:
                    state.seen.append(body)
                return (self.sglang(body) if route == "/generate" else self.vllm(body)), 200
            case "/pause_generation":
                sglang_schemas.SGLangPause.model_validate(body)
                state.pause()
                return {"message": "Generation paused successfully.", "status": "ok"}, 200
            case "/continue_generation":
                state.resume()
                return {"message": "Generation continued successfully.", "status": "ok"}, 200
            case "/update_weights_from_disk":
                asked = sglang_schemas.SGLangUpdateFromDisk.model_validate(body)
                state.load(asked.model_path)
                state.label = asked.weight_version
                return {"success": True, "message": "", "num_paused_requests": 0}, 200
            case "/update_weight_version":
                state.label = sglang_schemas.SGLangLabel.model_validate(body).new_version
                return {"success": True, "message": "", "new_version": state.label}, 200
            case "/abort_request":
                state.aborted.add(sglang_schemas.SGLangAbort.model_validate(body).rid)
                return {}, 200
            case "/pause":
                if urlsplit(self.path).query != "mode=abort":
                    return {"error": "mode"}, 400
                state.pause()
                return {"status": "paused"}, 200
            case "/resume":
                state.resume()
                return {"status": "resumed"}, 200
            case "/release_memory_occupation":
                sglang_schemas.SGLangMemory.model_validate(body)
                state.sleep(keep=state.backup)
                return None, 200
            case "/resume_memory_occupation" | "/wake_up":
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

    def sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = sglang_schemas.SGLangGenerate.model_validate(body)
        how = asked.sampling_params
        stop = [] if how.ignore_eos else [*how.stop_token_ids, self.state.own_end]
        drawing = Drawing(
            name=asked.rid,
            prompt=asked.input_ids,
            length=how.max_new_tokens,
            temperature=how.temperature,
            stop=stop,
            seed=how.sampling_seed,
            by_position=True,
        )
        drawn = self.state.draw(drawing)
        entries = zip(drawn.logprobs, drawn.tokens, strict=True)
        meta = {
            "id": asked.rid,
            "finish_reason": {"type": drawn.finish},
            "prompt_tokens": len(asked.input_ids),
            "completion_tokens": len(drawn.tokens),
            "weight_version": self.state.label,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in entries],
        }
        return {"text": "", "output_ids": drawn.tokens, "meta_info": meta}

    def vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = vllm_schemas.VLLMCompletion.model_validate(body)
        drawing = Drawing(
            name=asked.request_id,
            prompt=asked.prompt,
            length=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=[*asked.stop_token_ids, *([] if asked.ignore_eos else [self.state.own_end])],
            seed=asked.seed,
            by_position=False,
        )
        drawn = self.state.draw(drawing)
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": drawn.finish,
            "token_ids": drawn.tokens,
            "logprobs": {"token_logprobs": drawn.logprobs, "tokens": [""] * len(drawn.tokens)},
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


def serve(model: str, port: int, modern: bool, ports: Connection | None = None) -> None:
    """Serve for ever. Sends the port, or prints it."""
    torch.set_num_threads(1)
    Handler.state = State(model, modern=modern)
    server = Server(("127.0.0.1", port), Handler)
    if ports is None:
        print(server.server_address[1], flush=True)
    else:
        ports.send(server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), "modern" in sys.argv)
