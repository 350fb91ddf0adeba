"""Test server in a thread, with the routes of vLLM that sample from a model and from adapters: one plain forward for each token.

Adapters are merged into a copy of the model, by the tests' own arithmetic.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from areal.inference.http.servers import vllm_schemas
from areal.tests.harness.servers.generation import load, merged

KEY = "secret"


class Refused(Exception):
    """A reply with an error of vLLM's form."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class VLLMServer:
    """Server of one model.

    Attributes:
        models: models by the names under which they are served.
        canned: statuses of the next replies of ``/v1/completions``.
        hidden: whether folders of adapters cannot be seen.
        processed: whether log-probs are those after temperature, ``top_k`` and ``top_p``.
        step_seconds: duration of a token.
        calls: number of calls by route.
        ended: number of answers that ended because their client had gone.
    """

    def __init__(self, path: str, *, context: int = 64, max_logprobs: int = 20, tokenizer: str | None = None) -> None:
        self.path, self.context, self.max_logprobs = path, context, max_logprobs
        self.models: dict[str, PreTrainedModel] = {path: load(path)}
        self.tokenizer = None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
        self.canned: list[int] = []
        self.hidden, self.processed, self.step_seconds = False, True, 0.0
        self.calls: Counter[str] = Counter()
        self.ended = 0
        self.forward = threading.Lock()
        self.connections: set[socket.socket] = set()
        self._http: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def adapters(self) -> list[str]:
        return [name for name in self.models if name != self.path]

    def start(self) -> None:
        """Listen; after :meth:`stop`, on the same port, without the adapters."""
        self.models = {self.path: self.models[self.path]}
        handler = type("BoundHandler", (Handler,), {"server_of": self})
        self._http = _Listener(("127.0.0.1", self.port), handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
        # Their threads would go on to answer.
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def load_adapter(self, asked: vllm_schemas.VLLMLoadAdapter) -> str:
        folder = Path(asked.lora_path)
        if asked.lora_name in self.models:
            raise Refused(400, f"The lora adapter '{asked.lora_name}' has already been loaded.")
        if self.hidden or not folder.exists():
            raise Refused(404, f"Loading lora {asked.lora_name} failed: No adapter found for {folder}")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > 8:
            raise Refused(400, f"LoRA rank {config['r']} is greater than max_lora_rank 8.")
        try:
            self.models[asked.lora_name] = merged(
                self.models[self.path], load_file(folder / "adapter_model.safetensors"), config
            )
        except RuntimeError as error:
            raise Refused(500, f"Call to add_lora method failed: {error}") from error
        return f"Success: LoRA adapter '{asked.lora_name}' added successfully."

    def unload_adapter(self, asked: vllm_schemas.VLLMUnloadAdapter) -> str:
        if self.models.pop(asked.lora_name, None) is None:
            raise Refused(404, f"The lora adapter '{asked.lora_name}' cannot be found.")
        return "Success"

    def complete(self, asked: vllm_schemas.VLLMCompletion, gone: Any) -> dict[str, Any]:
        """Generate one answer."""
        self._check(asked)
        model = self.models[str(asked.model)]
        prompt_logprobs = None
        if asked.prompt_logprobs is not None:
            prompt_logprobs = self._of_prompt(model, asked)
        generator = torch.Generator().manual_seed(asked.seed)
        tokens: list[int] = []
        rows: list[Tensor] = []
        finish = "length"
        ends = [*asked.stop_token_ids, *([] if asked.ignore_eos else [1])]
        while len(tokens) < asked.max_tokens and finish == "length":
            time.sleep(self.step_seconds)
            if gone():
                self.ended += 1
                raise ConnectionError
            with self.forward:
                raw, drawn = distributions(model, [*asked.prompt, *tokens], asked)
            tokens.append(
                int(
                    drawn.argmax() if asked.temperature == 0 else torch.multinomial(drawn.exp(), 1, generator=generator)
                )
            )
            rows.append(drawn if self.processed else raw)
            text = self.tokenizer.decode(tokens) if self.tokenizer is not None else ""
            if tokens[-1] in ends or any(string in text for string in asked.stop or ()):
                finish = "stop"
        # As vLLM: the token itself first, then the most likely ones; -inf is written as -9999.
        own = [float(row[token]) for token, row in zip(tokens, rows, strict=True)]
        tops = []
        for token, row in zip(tokens, rows, strict=True):
            likely = [token, *row.topk(asked.logprobs).indices.tolist()]
            tops.append({f"token_id:{each}": max(float(row[each]), -9999.0) for each in likely})
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": finish,
            "token_ids": tokens,
            "logprobs": {"token_logprobs": own, "tokens": [f"token_id:{t}" for t in tokens], "top_logprobs": tops},
            "prompt_logprobs": prompt_logprobs,
        }
        if not all(torch.isfinite(torch.tensor(own))):
            raise Refused(400, "Out of range float values are not JSON compliant: nan")
        return {"id": f"cmpl-{asked.request_id}", "object": "text_completion", "choices": [choice]}

    def _check(self, asked: vllm_schemas.VLLMCompletion) -> None:
        if asked.model not in self.models:
            raise Refused(404, f"The model `{asked.model}` does not exist.")
        if self.canned:
            raise Refused(self.canned.pop(0), "canned")
        if max(asked.logprobs, asked.prompt_logprobs or 0) > self.max_logprobs:
            raise Refused(400, f"Requested logprobs is greater than max allowed: {self.max_logprobs}")
        vocabulary = self.models[self.path].config.vocab_size
        if max(asked.prompt) >= vocabulary:
            raise Refused(400, f"Token id {max(asked.prompt)} is out of vocabulary")
        if len(asked.prompt) + asked.max_tokens > self.context:
            raise Refused(400, f"This model's maximum context length is {self.context} tokens.")

    @torch.no_grad()
    def _of_prompt(self, model: PreTrainedModel, asked: vllm_schemas.VLLMCompletion) -> list[dict[int, Any] | None]:
        """Log-probs of the prompt at temperature 1, as vLLM computes them."""
        with self.forward:
            logprobs = model(torch.tensor([asked.prompt])).logits[0].float().log_softmax(-1)
        if not torch.isfinite(logprobs).all():
            raise Refused(400, "Out of range float values are not JSON compliant: nan")
        rows: list[dict[int, Any] | None] = [None]
        for token, row in zip(asked.prompt[1:], logprobs, strict=False):
            likely = [token, *row.topk(asked.prompt_logprobs or 0).indices.tolist()]
            rows.append({each: {"logprob": float(row[each]), "rank": 1, "decoded_token": ""} for each in likely})
        return rows


@torch.no_grad()
def distributions(model: PreTrainedModel, text: list[int], asked: vllm_schemas.VLLMCompletion) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the next token at temperature 1, and those of the distribution that is drawn from."""
    logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1].float()
    raw = logits.log_softmax(-1)
    if asked.temperature == 0:
        return raw, raw
    logits = logits / max(asked.temperature, 0.01)
    if asked.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(asked.top_k).values[-1], -torch.inf)
    if asked.top_p < 1:
        ordered, places = logits.softmax(-1).sort(descending=True)
        logits[places[ordered.cumsum(-1) - ordered >= asked.top_p]] = -torch.inf
    return raw, logits.log_softmax(-1)


class _Listener(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server_of: VLLMServer

    def setup(self) -> None:
        super().setup()
        self.server_of.connections.add(self.connection)

    def finish(self) -> None:
        self.server_of.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        state = self.server_of
        state.calls[self.path] += 1
        if self.path == "/health":
            return self._reply({})
        cards = [
            {
                "id": name,
                "root": name,
                "parent": None if name == state.path else state.path,
                "max_model_len": state.context,
            }
            for name in state.models
        ]
        return self._reply({"object": "list", "data": cards})

    def do_POST(self) -> None:
        state = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state.calls[self.path] += 1
        try:
            if self.headers["Authorization"] not in (None, f"Bearer {KEY}"):
                raise Refused(401, "Unauthorized")
            match self.path:
                case "/v1/completions":
                    self._reply(state.complete(vllm_schemas.VLLMCompletion.model_validate(body), self._gone))
                case "/v1/load_lora_adapter":
                    self._reply(state.load_adapter(vllm_schemas.VLLMLoadAdapter.model_validate(body)))
                case "/v1/unload_lora_adapter":
                    self._reply(state.unload_adapter(vllm_schemas.VLLMUnloadAdapter.model_validate(body)))
        except (Refused, ValidationError) as error:
            status = error.status if isinstance(error, Refused) else 422
            self._reply({"error": {"message": str(error), "type": "BadRequestError", "code": status}}, status)

    def _gone(self) -> bool:
        """Return whether the client has closed its connection."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1) == b""
        except BlockingIOError:
            return False
        finally:
            self.connection.setblocking(True)

    def _reply(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
