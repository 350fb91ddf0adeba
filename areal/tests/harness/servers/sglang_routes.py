"""Routes of SGLang for the test server, after the wheel of release 0.5.23.

``srt/entrypoints/http_server.py`` has the routes, ``srt/managers/tokenizer_manager.py`` the replies and what waits during a pause,
``srt/managers/scheduler.py`` the pauses, ``srt/layers/sampler.py`` the log-probs, ``srt/lora/lora_registry.py`` the adapters.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from areal.tests.harness.servers import sglang_bodies as bodies
from areal.tests.harness.servers.generation import Drawing, Drawn
from areal.tests.harness.servers.server_state import State

Answer = tuple[Any, int]

MAX_RANK = 8
"""Argument ``--max-lora-rank``."""
RESERVED = 6
"""Tokens of the context that a prompt must leave."""
NO_TOP_K = 2**30
"""The value of ``top_k`` for none."""
STREAMED = 50
"""A request that waits in the queue has sent its tokens by so many."""


class Refused(ValueError):
    """A request that is refused with status 400."""


class SGLangRoutes:
    """Answers of one request."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.gets: dict[str, Callable[[], Any]] = {
            "/health": str,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
        }
        self.posts: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "/generate": (bodies.Generate, self._generate),
            "/tokenize": (bodies.Tokenize, self._tokenize),
            "/pause_generation": (bodies.Pause, self._pause),
            "/continue_generation": (bodies.Nothing, self._continue),
            "/update_weights_from_disk": (bodies.UpdateFromDisk, self._load),
            "/update_weight_version": (bodies.SetVersion, self._set_version),
            "/flush_cache": (bodies.Nothing, lambda _: "Cache flushed."),
            "/abort_request": (bodies.Abort, self._abort),
            "/load_lora_adapter": (bodies.LoadAdapter, self._load_adapter),
            "/unload_lora_adapter": (bodies.UnloadAdapter, self._unload_adapter),
            "/release_memory_occupation": (bodies.Memory, lambda _: state.sleep(keep=state.backup)),
            "/resume_memory_occupation": (bodies.Memory, lambda _: state.wake()),
        }

    def handle(self, method: str, route: str, body: dict[str, Any]) -> Answer | None:
        """Answer a request: body and status. Returns ``None`` if it is of another server."""
        if method == "GET":
            return (self.gets[route](), 200) if route in self.gets else None
        if route not in self.posts:
            return None
        kind, work = self.posts[route]
        try:
            return work(kind.model_validate(body)), 200
        except ValidationError as error:
            return {"object": "error", "message": str(error)}, 400
        except (OSError, ValueError) as error:
            if "lora" in route:
                loaded = None if "unload" in route else self._loaded()
                return {"success": False, "error_message": str(error), "loaded_adapters": loaded}, 400
            if "weights_from" in route:
                return {"success": False, "message": str(error), "num_paused_requests": 0}, 400
            return {"error": {"message": str(error)}}, 400

    # ---- what it is

    def _model_info(self) -> dict[str, Any]:
        config = self.state.model.config
        return {
            "model_path": self.state.served,
            "served_model_name": self.state.served,
            "tokenizer_path": self.state.root,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.state.label,
            "load_format": "auto",
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    def _server_info(self) -> dict[str, Any]:
        """Answer with the arguments of the start, and the release."""
        state = self.state
        arguments = {"model_path": state.root, "tokenizer_path": state.root, "tp_size": 1, "pp_size": 1, "dp_size": 1}
        arguments |= {"enable_dp_attention": False, "enable_lora": state.lora, "context_length": None}
        arguments |= {"max_req_input_len": state.context - RESERVED, "sampling_mask_max_tokens": state.mask_tokens}
        arguments |= {"enable_deterministic_inference": True, "quantization": state.quantization}
        return {**arguments, "internal_states": [{}], "version": state.release, "frontend": "python"}

    def _models(self) -> dict[str, Any]:
        state = self.state
        base = {"id": state.served, "root": state.served, "parent": None, "max_model_len": state.context}
        adapters = [
            {"id": name, "root": each[0], "parent": state.served, "max_model_len": None}
            for name, each in state.adapters.items()
        ]
        common = {"object": "model", "created": 0, "owned_by": "sglang"}
        return {"object": "list", "data": [common | card for card in (base, *adapters)]}

    def _tokenize(self, asked: bodies.Tokenize) -> dict[str, Any]:
        if self.state.tokenizer is None:
            raise Refused("'NoneType' object has no attribute 'encode'")
        tokens = self.state.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.state.context}

    # ---- generation

    def _generate(self, asked: bodies.Generate) -> dict[str, Any]:
        state, how = self.state, asked.sampling_params
        with state.changed:
            state.seen.append(asked.model_dump(exclude_unset=True))
        if asked.sampling_logprobs_mode is not None and not asked.return_sampling_mask:
            raise Refused("sampling_logprobs_mode can only be set when return_sampling_mask=true.")
        if how.stop and state.tokenizer is None:
            raise Refused(
                f"stop={how.stop!r} is unavailable when skip_tokenizer_init=True (requires tokenizer to decode tokens to text for matching)."
            )
        self._check_lengths(len(asked.input_ids), how.max_new_tokens)
        if how.temperature < 0:
            raise Refused(f"temperature must be a non-negative finite number, got {how.temperature:g}.")
        if how.sampling_seed >= 2**63:
            raise Refused(f"sampling_seed must be in [-2**63, 2**63 - 1], got {how.sampling_seed}.")
        greedy = how.temperature == 0
        drawing = Drawing(
            name=asked.rid,
            # With adapters, another token is looked up in another table.
            prompt=[min(token, state.model.config.vocab_size - 1) for token in asked.input_ids],
            length=min(how.max_new_tokens, state.context - 2 - len(asked.input_ids)),
            temperature=how.temperature,
            top_p=1.0 if greedy else how.top_p,
            top_k=0 if greedy else max(how.top_k, 0),
            # ignore_eos disables both.
            stop=[] if how.ignore_eos else [*how.stop_token_ids, state.own_end],
            stop_strings=how.stop,
            seed=how.sampling_seed,
            by_position=True,
            model=asked.lora_path,
        )
        # One that was unloaded is loaded again.
        if asked.lora_path in state.known:
            state.adapters.setdefault(asked.lora_path, state.known[asked.lora_path])
        if asked.lora_path is not None and asked.lora_path not in state.adapters:
            raise Refused(
                f"Got LoRA adapter that has never been loaded: {asked.lora_path}\nAll loaded adapters: {dict(state.adapters).keys()}."
            )
        self._check_mask(asked)
        if max(asked.input_ids) >= state.model.config.vocab_size and not state.lora:
            state.end()
        drawn = state.draw(drawing)
        if drawn.queued:
            drawn = drawn.first(len(drawn.tokens) // STREAMED * STREAMED)
        text = {} if state.tokenizer is None else {"text": ""}
        return {**text, "output_ids": drawn.tokens, "meta_info": self._meta(asked, drawn)}

    def _check_mask(self, asked: bodies.Generate) -> None:
        """Refuse a mask without a limit."""
        top_k, limit = asked.sampling_params.top_k, self.state.mask_tokens
        if asked.return_sampling_mask and asked.sampling_params.temperature and not 1 <= top_k <= limit:
            raise Refused(
                f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {limit}; got top_k="
                f"{NO_TOP_K if top_k == -1 else top_k}. Lower top_k or increase --sampling-mask-max-tokens."
            )

    def _check_lengths(self, prompt: int, answer: int) -> None:
        """Refuse what does not fit into the context."""
        context = self.state.context
        if not prompt:
            raise Refused("input_ids cannot be empty.")
        if prompt >= context:
            raise Refused(f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens).")
        if prompt >= context - RESERVED and prompt + answer <= context:
            limit = context - RESERVED
            raise Refused(
                f"Input length ({prompt} tokens) exceeds the maximum allowed length ({limit} tokens). Use a shorter input or enable "
                "--allow-auto-truncate."
            )
        if prompt + answer > context:
            raise Refused(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of "
                f"{prompt + answer} tokens: {prompt} tokens from the input messages and {answer} tokens for the completion. Please reduce "
                "the number of tokens in the input messages or the completion to fit within the limit."
            )

    def _meta(self, asked: bodies.Generate, drawn: Drawn) -> dict[str, Any]:
        finish: dict[str, Any] = {"type": drawn.finish}
        finish |= {
            "stop": {"matched": drawn.matched},
            "length": {"length": len(drawn.tokens)},
            "abort": {"message": "Abort in waiting queue" if drawn.queued else "Aborted"},
        }.get(drawn.finish, {})
        spans, start = [], 0
        for label, group in groupby(drawn.labels):
            end = start + len(list(group))
            spans.append({"version": label, "start": start, "end": end})
            start = end
        spans = spans or [{"version": self.state.label, "start": 0, "end": 0}]
        # Log-probs are those before top_p and top_k.
        plain = [_finite(float(row[token])) for token, row in zip(drawn.tokens, drawn.plain, strict=True)]
        meta: dict[str, Any] = {
            "id": asked.rid,
            "finish_reason": finish,
            "prompt_tokens": len(asked.input_ids),
            "weight_versions": spans,
            "weight_version": spans[-1]["version"],
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[p, token, None] for p, token in zip(plain, drawn.tokens, strict=True)],
            "output_token_logprobs_length": len(plain),
            "completion_tokens": len(drawn.tokens),
            "cached_tokens": 0,
        }
        if asked.top_logprobs_num:
            best = [row.topk(min(asked.top_logprobs_num, len(row))) for row in drawn.plain]
            rows = [zip(each.values.tolist(), each.indices.tolist(), strict=True) for each in best]
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [[[_finite(p), token, None] for p, token in row] for row in rows]
        if asked.return_sampling_mask and not drawn.queued:
            meta |= self._support(asked, drawn)
        return meta

    def _support(self, asked: bodies.Generate, drawn: Drawn) -> dict[str, Any]:
        """Tokens that ``top_p`` and ``top_k`` leave, the most likely first, and log-probs under the distribution over them."""
        masks: list[list[int]] = []
        values: list[Any] = []
        for token, row in zip(drawn.tokens, drawn.drawn, strict=True):
            ordered = row.sort(descending=True)
            count = int(torch.isfinite(ordered.values).sum())
            masks.append(ordered.indices[:count].tolist())
            support = asked.sampling_logprobs_mode == "support"
            values.append(ordered.values[:count].tolist() if support else float(row[token]))
        return {
            "output_token_sampling_mask": masks,
            "output_token_sampling_logprobs": values,
            "output_token_sampling_mask_length": len(masks),
        }

    def _abort(self, asked: bodies.Abort) -> str:
        self.state.aborted.add(asked.rid)
        return ""

    # ---- pauses and weights

    def _pause(self, asked: bodies.Pause) -> dict[str, Any]:
        self.state.pause("abort" if asked.mode == "abort" else "keep")
        if asked.mode == "abort":
            # It returns when all requests have.
            with self.state.changed:
                self.state.changed.wait_for(lambda: not self.state.running)
        self.state.retracted = asked.mode == "retract"
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, _: Any) -> dict[str, Any]:
        self.state.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _load(self, asked: bodies.UpdateFromDisk) -> dict[str, Any]:
        state = self.state
        if not state.paused:
            with state.changed:
                state.changed.wait_for(lambda: not state.running)
        state.load_unchecked(Path(asked.model_path))
        state.served = asked.model_path
        words = "Succeeded to update model weights."
        if asked.weight_version is not None:
            state.label = asked.weight_version
            words += f" Weight version updated to {asked.weight_version}."
        if asked.flush_cache and state.kept and not state.retracted and state.running:
            raise Refused(
                "Weights were updated, but the cache was not flushed because requests are still running or queued."
            )
        return {"success": True, "message": words, "num_paused_requests": 0}

    def _set_version(self, asked: bodies.SetVersion) -> dict[str, Any]:
        with self.state.forward:
            self.state.label = asked.new_version
        return {
            "success": True,
            "message": f"Weight version updated to {asked.new_version}",
            "new_version": asked.new_version,
        }

    def _load_adapter(self, asked: bodies.LoadAdapter) -> dict[str, Any]:
        state, folder = self.state, Path(asked.lora_path)
        if not state.lora:
            raise Refused("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if asked.lora_name in state.adapters:
            raise Refused(f"Failed to load LoRA adapter {asked.lora_name} because it is already loaded")
        if not folder.is_dir():
            raise Refused(
                f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{folder}'. Use `repo_type` argument if needed."
            )
        config = json.loads((folder / "adapter_config.json").read_text())
        if isinstance(config["target_modules"], str) and config["target_modules"] not in ("all", "all-linear"):
            raise Refused("Only 'all' or 'all-linear' can be used as the string for target module")
        if config["r"] > MAX_RANK:
            raise Refused(
                f"LoRA adapter {asked.lora_name} with rank {config['r']} is incompatible with the current LoRA memory pool configuration. "
                "Please ensure that the LoRA adapter's rank is within the configured `--max-lora-rank` and that the target modules are "
                "included in `--lora-target-modules`."
            )
        state.add_adapter(asked.lora_name, str(folder), load_file(folder / "adapter_model.safetensors"), config)
        return self._adapters()

    def _unload_adapter(self, asked: bodies.UnloadAdapter) -> dict[str, Any]:
        state = self.state
        if not state.remove_adapter(asked.lora_name):
            raise Refused(f"LoRA with name {asked.lora_name} does not exist. Loaded LoRAs: {self._keys()}")
        # It waits for the adapter's requests.
        with state.changed:
            state.changed.wait_for(lambda: not state.running)
        return self._adapters()

    def _keys(self) -> str:
        return str(OrderedDict.fromkeys(self.state.adapters).keys())

    def _loaded(self) -> dict[str, str]:
        return {name: each[0] for name, each in self.state.adapters.items()}

    def _adapters(self) -> dict[str, Any]:
        return {"success": True, "error_message": "", "loaded_adapters": self._loaded()}


def _finite(logprob: float) -> float | None:
    """Return a log-prob as JSON has it: null if it is not finite."""
    return logprob if math.isfinite(logprob) else None
