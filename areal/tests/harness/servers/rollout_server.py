"""Test server with the routes of SGLang and of vLLM: plain transformers, one forward over the full text for each token.

``python -m areal.tests.harness.servers.rollout_server MODEL`` prints its port. ``POST /test`` sets the faults to simulate.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.trainer.rollout.http import schemas


class Drawing(BaseModel):
    """One generation request, from either kind of route."""

    name: str
    prompt: list[int]
    length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    stop: list[int]
    seed: int
    by_position: bool


class State:
    def __init__(self, path: str) -> None:
        self.path = path
        self.changed = threading.Condition()
        self.forward = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.seen: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        with self.changed:
            self.model, self.label = load(self.path), "default"
            self.paused, self.epoch, self.step_seconds = False, 0, 0.0
            self.asleep, self.backup = False, False
            self.aborted: set[str] = set()
            self.canned: list[dict[str, Any]] = []
            self.calls.clear()
            self.seen.clear()
            self.changed.notify_all()

    def canned_for(self, route: str) -> dict[str, Any] | None:
        with self.changed:
            for entry in self.canned:
                if entry["route"] == route and entry["times"] > 0:
                    entry["times"] -= 1
                    return entry
        return None

    def draw(self, asked: Drawing) -> tuple[list[int], list[float], str]:
        """Generate tokens.

        Returns tokens, their log-probs and the finish reason. Blocks while the server is paused; a pause aborts it.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self.paused)
            epoch = self.epoch
        generator = torch.Generator().manual_seed(asked.seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < asked.length:
            if self.asleep:
                raise ValueError("a forward without memory")
            time.sleep(self.step_seconds)
            if self.epoch != epoch or asked.name in self.aborted:
                return tokens, logprobs, "abort"
            with self.forward:
                if self.epoch != epoch:
                    return tokens, logprobs, "abort"
                text = [*asked.prompt, *tokens]
                if asked.by_position:
                    generator.manual_seed((asked.seed * 1000003 + len(text)) % 2**63)
                token, logprob = one(self.model, text, asked, generator)
            tokens.append(token)
            logprobs.append(logprob)
            if token in asked.stop:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"

    def pause(self) -> None:
        with self.forward, self.changed:
            self.paused = True
            self.epoch += 1

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self.changed.notify_all()

    def sleep(self, *, keep: bool) -> None:
        """Free the memory. Without a backup, the weights are lost."""
        with self.forward, self.changed:
            if not self.paused:
                raise ValueError("the server is not idle")
            self.asleep = True
            if not keep:
                for parameter in self.model.parameters():
                    parameter.data.zero_()

    def wake(self) -> None:
        with self.changed:
            self.asleep = False

    def load(self, path: str) -> None:
        if self.asleep:
            raise ValueError("the memory of the weights is not there")
        model = load(path)
        with self.forward:
            self.model = model


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def one(model: PreTrainedModel, text: list[int], asked: Drawing, generator: torch.Generator) -> tuple[int, float]:
    logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1].float()
    if asked.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    logits = logits / asked.temperature
    if asked.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(asked.top_k).values[-1], -torch.inf)
    if asked.top_p < 1:
        ordered, places = logits.softmax(-1).sort(descending=True)
        logits[places[ordered.cumsum(-1) - ordered >= asked.top_p]] = -torch.inf
    token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return token, float(logits.log_softmax(-1)[token])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    state: State

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/test":
            return self.answer({"calls": dict(self.state.calls), "seen": self.state.seen})
        return self.answer({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        route = urlsplit(self.path).path
        if route == "/test":
            return self.misbehave(body)
        with self.state.changed:
            self.state.calls[route] += 1
        canned = self.state.canned_for(route)
        if canned is not None:
            time.sleep(canned.get("delay", 0))
            return self.raw(canned["body"].encode(), canned["status"])
        try:
            return self.answer(*self.handle_route(route, body))
        except ValidationError as error:
            return self.answer({"detail": str(error)}, 422)
        except (OSError, ValueError) as error:
            return self.answer({"success": False, "message": str(error)}, 400)

    def misbehave(self, body: dict[str, Any]) -> None:
        if body.pop("reset", False):
            self.state.reset()
        self.state.step_seconds = body.pop("step_seconds", self.state.step_seconds)
        self.state.label = body.pop("label", self.state.label)
        self.state.backup = body.pop("backup", self.state.backup)
        with self.state.changed:
            self.state.canned += [body] if body else []
        self.answer({})

    def handle_route(self, route: str, body: dict[str, Any]) -> tuple[Any, int]:
        state = self.state
        match route:
            case "/generate" | "/v1/completions":
                with state.changed:
                    state.seen.append(body)
                return (self.sglang(body) if route == "/generate" else self.vllm(body)), 200
            case "/pause_generation":
                schemas.SGLangPause.model_validate(body)
                state.pause()
                return {"message": "Generation paused successfully.", "status": "ok"}, 200
            case "/continue_generation":
                state.resume()
                return {"message": "Generation continued successfully.", "status": "ok"}, 200
            case "/update_weights_from_disk":
                asked = schemas.SGLangUpdateFromDisk.model_validate(body)
                state.load(asked.model_path)
                state.label = asked.weight_version
                return {"success": True, "message": "", "num_paused_requests": 0}, 200
            case "/abort_request":
                state.aborted.add(schemas.SGLangAbort.model_validate(body).rid)
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
                schemas.SGLangMemory.model_validate(body)
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
                state.load(schemas.VLLMReload.model_validate(body).kwargs.weights_path)
                return {"results": [None]}, 200
        return {"detail": "Not Found"}, 404

    def sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = schemas.SGLangGenerate.model_validate(body)
        how = asked.sampling_params
        stop = [] if how.ignore_eos else [*how.stop_token_ids, self.own_end]
        drawing = Drawing(
            name=asked.rid,
            prompt=asked.input_ids,
            length=how.max_new_tokens,
            temperature=how.temperature,
            stop=stop,
            seed=how.sampling_seed,
            by_position=True,
        )
        tokens, logprobs, finish = self.state.draw(drawing)
        meta = {
            "id": asked.rid,
            "finish_reason": {"type": finish},
            "prompt_tokens": len(asked.input_ids),
            "completion_tokens": len(tokens),
            "weight_version": self.state.label,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)],
        }
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    @property
    def own_end(self) -> int:
        """The end-of-sequence token of the model."""
        return int(self.state.model.generation_config.eos_token_id)

    def vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = schemas.VLLMCompletion.model_validate(body)
        drawing = Drawing(
            name=asked.request_id,
            prompt=asked.prompt,
            length=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=[*asked.stop_token_ids, *([] if asked.ignore_eos else [self.own_end])],
            seed=asked.seed,
            by_position=False,
        )
        tokens, logprobs, finish = self.state.draw(drawing)
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": finish,
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs, "tokens": [""] * len(tokens)},
        }
        return {"id": asked.request_id, "object": "text_completion", "choices": [choice]}

    def answer(self, content: Any, status: int = 200) -> None:
        self.raw(json.dumps(content).encode(), status)

    def raw(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""


def main() -> None:
    torch.set_num_threads(1)
    Handler.state = State(sys.argv[1])
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
