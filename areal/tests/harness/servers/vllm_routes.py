"""Routes of a current vLLM for the test server. A test compares their answers with recorded ones of the real server."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from areal.tests.harness.servers.experts import npy
from areal.tests.harness.servers.generation import Drawing, Drawn
from areal.tests.harness.servers.server_state import Dead, LoadError, State
from areal.tests.harness.servers.vllm_bodies import Completion, Generate, SamplingParams, Tokenize

MAX_RANK = 8
NOT_FINITE = "Out of range float values are not JSON compliant"
DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."

Answer = tuple[int, Any]


class Refused(Exception):
    """A reply with an error of vLLM's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    @property
    def content(self) -> dict[str, Any]:
        """Body of the reply."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


class VLLMRoutes:
    """Answers of one request."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.routes: dict[tuple[str, str], Callable[[str, dict[str, Any]], Any]] = {
            ("GET", "/health"): lambda *_: "",
            ("GET", "/openapi.json"): lambda *_: {"paths": {route: {} for route in self._listed()}},
            ("GET", "/server_info"): self._server_info,
            ("GET", "/v1/models"): self._models,
            ("GET", "/weight_info"): lambda *_: {"weight_version": state.label},
            ("GET", "/get_world_size"): lambda *_: {"world_size": 1},
            ("GET", "/is_paused"): lambda *_: {"is_paused": state.paused},
            ("GET", "/is_sleeping"): lambda *_: {"is_sleeping": state.asleep},
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/update_weight_version"): self._set_label,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/reset_prefix_cache"): lambda *_: {"success": True},
            ("POST", "/init_weight_transfer_engine"): self._transfer,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake,
        }

    def handle(self, method: str, route: str, query: str, body: dict[str, Any], key: str) -> Answer:
        """Answer a request: status and body."""
        state = self.state
        # Only these routes are protected by the key.
        if state.key and route.startswith(("/v1", "/inference")) and key != f"Bearer {state.key}":
            return 401, {"error": "Unauthorized"}
        if route == "/inference/v1/generate" and route in state.without:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return 403, Refused(403, message, "PermissionDeniedError").content
        if (method, route) not in self.routes or route in state.without:
            return 404, {"detail": "Not Found"}
        try:
            return 200, self.routes[method, route](query, body)
        except Refused as error:
            return error.status, error.content
        except ValidationError as error:
            param = ".".join(["body", *map(str, error.errors()[0]["loc"])])
            return 400, Refused(400, f"1 validation error:\n{error}", "Bad Request", param).content
        except Dead:
            # The reply goes out first.
            threading.Timer(0.2, os._exit, (0,)).start()
            return 500, Refused(500, DIED, "InternalServerError").content

    def _listed(self) -> list[str]:
        """Return the routes that the server says it has."""
        return sorted({route for _, route in self.routes if route not in (*self.state.without, "/openapi.json")})

    def _server_info(self, query: str, _: dict[str, Any]) -> dict[str, Any]:
        if query != "config_format=json":
            return {"vllm_config": "a text"}
        state = self.state
        config = {
            "logprobs_mode": state.logprobs_mode,
            "max_model_len": state.context,
            "dtype": "torch.float32",
            "max_logprobs": 20,
            "enable_return_routed_experts": state.routed_experts,
            "quantization": state.quantization,
        }
        return {"vllm_config": {"model_config": config}}

    def _tokenize(self, _: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = Tokenize.model_validate(body)
        if self.state.tokenizer is None:
            raise Refused(400, "the model has no tokenizer")
        tokens = self.state.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        return {"count": len(tokens), "max_model_len": self.state.context, "tokens": tokens, "token_strs": None}

    def _models(self, *_: Any) -> dict[str, Any]:
        base = self.state.path
        served = [(base, self.state.root, None)] + [(name, each[0], base) for name, each in self.state.adapters.items()]
        return {"object": "list", "data": [self._card(*each) for each in served]}

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        allowed = {
            f"allow_{what}": what not in ("create_engine", "search_indices", "fine_tuning")
            for what in ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
        }
        permission = {"id": f"modelperm-{name}", "object": "model_permission", "created": int(time.time()), **allowed}
        permission |= {"organization": "*", "group": None, "is_blocking": False}
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": root}
        length = None if parent else self.state.context
        return card | {"parent": parent, "max_model_len": length, "permission": [permission]}

    # ---- generation

    def _completion(self, _: str, body: dict[str, Any]) -> dict[str, Any]:
        self._note(body)
        asked = Completion.model_validate(body)
        length = len(asked.prompt)
        self._check(asked.model, asked.prompt, asked.stop_token_ids)
        if length > self.state.context:
            message = (
                f"This model's maximum context length is {self.state.context} tokens. However, your prompt contains at least "
                f"{self.state.context + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                f"length of the input prompt. (parameter=input_tokens, value={self.state.context + 1})"
            )
            raise Refused(400, message, param="input_tokens")
        if length == self.state.context:
            raise Refused(
                400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", param="max_tokens"
            )
        drawn = self._draw(asked.request_id, asked.prompt, asked, asked.model)
        if not all(map(math.isfinite, drawn.logprobs)):
            raise Refused(400, NOT_FINITE)
        logprobs = {
            "text_offset": [0] * len(drawn.tokens),
            "token_logprobs": drawn.logprobs,
            "tokens": [""] * len(drawn.tokens),
            "top_logprobs": by_text(drawn, asked),
        }
        choice = {
            "index": 0,
            "text": "",
            "logprobs": logprobs,
            "finish_reason": drawn.finish,
            "stop_reason": drawn.matched,
            "token_ids": drawn.tokens,
            "prompt_logprobs": None,
            "prompt_token_ids": asked.prompt,
            "routed_experts": self._experts(drawn),
        }
        return {
            "id": f"cmpl-{asked.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model or self.state.path,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": "test-server",
            "usage": _usage(length, len(drawn.tokens)),
            **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics")),
        }

    def _generate(self, _: str, body: dict[str, Any]) -> dict[str, Any]:
        self._note(body)
        asked, context = Generate.model_validate(body), self.state.context
        length = len(asked.token_ids)
        self._check(asked.model, asked.token_ids, asked.sampling_params.stop_token_ids)
        if length > context:
            message = (
                f"The decoder prompt (length {length}) is longer than the maximum model length of {context}. Make sure that "
                "`max_model_len` is no smaller than the number of text tokens."
            )
            raise Refused(400, message)
        if length == context:
            message = (
                f"The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer than the "
                f"maximum model length of {context}. Make sure that `max_model_len` is no smaller than the number of text tokens "
                "(prompt + requested output tokens)."
            )
            raise Refused(400, message)
        drawn = self._draw(asked.request_id, asked.token_ids, asked.sampling_params, asked.model)
        entries = []
        count = asked.sampling_params.logprobs
        for row in tops(drawn, count):
            # As the real server: the sampled token counts, and log-probs that are not finite have a number.
            top = [
                {"token_id": token, "logprob": logprob, "rank": 1 if logprob > -9999.0 else None}
                for token, logprob in row[: max(count, 1)]
            ]
            entries.append({**top[0], "top_logprobs": top})
        choice = {
            "index": 0,
            "finish_reason": drawn.finish,
            "stop_reason": drawn.matched,
            "token_ids": drawn.tokens,
            "routed_experts": self._experts(drawn),
            "sampling_mask": None,
            "weight_versions": _runs(drawn),
            "logprobs": {"content": entries},
        }
        empty = ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics")
        return {
            "request_id": asked.request_id,
            "model": asked.model or self.state.path,
            "created": int(time.time()),
            "usage": _usage(length, len(drawn.tokens)),
            **dict.fromkeys((*empty, "kv_transfer_params", "ec_transfer_params")),
            "output_mode": "tokens",
            "choices": [choice],
        }

    def _note(self, body: dict[str, Any]) -> None:
        with self.state.changed:
            self.state.seen.append(body)

    def _check(self, model: str | None, prompt: list[int], stop: list[int]) -> None:
        """Refuse what the served models do not have."""
        if model is not None and model != self.state.path and model not in self.state.adapters:
            message = f"The model `{model}` does not exist. Valid aliases: <path>"
            raise Refused(404, message, "NotFoundError", "model")
        size = self.state.model.config.vocab_size
        outside = [token for token in stop if token >= size]
        if max(prompt) >= size:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        if outside:
            message = (
                f"token_id(s) {outside} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: {size} "
                f"(parameter=stop_token_ids, value={outside})"
            )
            raise Refused(400, message, param="stop_token_ids")

    def _experts(self, drawn: Drawn) -> str | None:
        return npy(torch.stack(drawn.experts)) if self.state.routed_experts and drawn.experts else None

    def _draw(self, name: str, prompt: list[int], asked: Completion | SamplingParams, model: str | None) -> Drawn:
        drawing = Drawing(
            name=name,
            prompt=prompt,
            length=min(asked.max_tokens, self.state.context - len(prompt)),
            temperature=max(asked.temperature, 0.01) if asked.temperature else 0.0,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            stop=[*asked.stop_token_ids, *([] if asked.ignore_eos else [self.state.own_end])],
            stop_strings=asked.stop,
            seed=asked.seed,
            by_position=False,
            raw=self.state.logprobs_mode == "raw_logprobs",
            model=model,
        )
        return self.state.draw(drawing)

    # ---- weights

    def _set_label(self, _: str, body: dict[str, Any]) -> dict[str, Any]:
        # Under the lock of a forward: the label of a token is that of its time.
        with self.state.forward:
            self.state.label = str(body["new_version"])
        return {"success": True, "new_version": body["new_version"]}

    def _pause(self, query: str, _: dict[str, Any]) -> dict[str, Any]:
        mode = query.removeprefix("mode=") or "abort"
        if mode not in ("abort", "wait", "keep"):
            message = (
                "1 validation error:\n  {'type': 'literal_error', 'loc': 'query.mode', 'msg': \"Input should be 'abort', 'wait' or "
                f"'keep'\", 'input': '{mode}', 'ctx': {{'expected': \"'abort', 'wait' or 'keep'\"}}}}"
            )
            raise Refused(400, message, "Bad Request", "query.mode")
        self.state.pause(mode)
        return {"status": "paused"}

    def _resume(self, *_: Any) -> dict[str, Any]:
        self.state.resume()
        return {"status": "resumed"}

    def _collective_rpc(self, _: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["method"] != "reload_weights":
            raise _of_worker("collective_rpc", f"'CPUWorker' object has no attribute '{body['method']}'")
        try:
            self.state.reload(Path(body["kwargs"]["weights_path"]))
        except LoadError as error:
            raise _of_worker("collective_rpc", str(error)) from error
        return {"results": [None]}

    def _transfer(self, *_: Any) -> dict[str, Any]:
        words = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
        raise _of_worker("collective_rpc", words)

    def _load_adapter(self, _: str, body: dict[str, Any]) -> str:
        if "lora_name" not in body:
            message = (
                "1 validation error:\n  {'type': 'missing', 'loc': 'body.lora_name', 'msg': 'Field required', "
                "'input': '<dict of 1 items>'}"
            )
            raise Refused(400, message, "Bad Request", "body.lora_name")
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.state.adapters and not body.get("load_inplace", False):
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            raise Refused(400, message, "InvalidUserInput")
        if not folder.exists():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > MAX_RANK:
            raise _of_worker("add_lora", f"LoRA rank {config['r']} is greater than max_lora_rank {MAX_RANK}.")
        tensors = load_file(folder / "adapter_model.safetensors")
        self.state.add_adapter(name, str(folder), tensors, config, inplace=body.get("load_inplace", False))
        return f"Success: LoRA adapter '{name}' added successfully."

    def _unload_adapter(self, _: str, body: dict[str, Any]) -> str:
        name = body["lora_name"]
        if not self.state.remove_adapter(name):
            raise Refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _sleep(self, query: str, _: dict[str, Any]) -> dict[str, Any]:
        # Unlike other routes for memory, it pauses by itself.
        self.state.pause()
        self.state.sleep(keep=True)
        return {"status": "sleeping", "level": int(query.removeprefix("level=") or 1)}

    def _wake(self, *_: Any) -> dict[str, Any]:
        self.state.wake()
        self.state.resume()
        return {"status": "awake", "tags": None}


def _of_worker(method: str, words: str) -> Refused:
    """Return the reply after an exception in a worker."""
    message = f"Call to {method} method failed: Worker failed with error '{words}', please check the stack trace above for the root cause"
    return Refused(500, message, "InternalServerError")


def by_text(drawn: Drawn, asked: Completion) -> list[dict[str, float]]:
    """Return ``top_logprobs`` of ``/v1/completions``."""
    return [
        {(f"token_id:{token}" if asked.return_tokens_as_token_ids else ""): logprob for token, logprob in row}
        for row in tops(drawn, asked.logprobs)
    ]


def tops(drawn: Drawn, count: int) -> list[list[tuple[int, float]]]:
    """Return for each position the sampled token, and then the most likely ones, with their log-probs."""
    rows = []
    for token, logprob, row in zip(drawn.tokens, drawn.logprobs, drawn.drawn, strict=True):
        values = {token: logprob} | {each: float(row[each]) for each in row.topk(count).indices.tolist()}
        rows.append([(each, value if math.isfinite(value) else -9999.0) for each, value in values.items()])
    return rows


def _usage(prompt: int, generated: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None}


def _runs(drawn: Drawn) -> list[dict[str, Any]]:
    """Return the labels of consecutive tokens, each with its range."""
    runs, start = [], 0
    for label, group in groupby(drawn.labels):
        end = start + len(list(group))
        runs.append({"version": label, "start": start, "end": end})
        start = end
    return runs
