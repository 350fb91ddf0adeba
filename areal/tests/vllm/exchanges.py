"""Requests whose answers are recorded: the same are sent to a real vLLM and to the test server.

Each function sends the requests of one topic, and returns the normalized answers by name.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from areal.api import LoRAConfig
from areal.tests.grid.models import adapter_dir
from areal.tests.vllm.server import CONTEXT, VOCABULARY

Call = Callable[..., tuple[int, Any]]
"""Sends one request: route, body and method. Returns status and body."""

RECORDED = Path(__file__).with_name("recorded.json")
PROMPT = [5, 6, 7, 8]
_WHOLE = ("data", "paths", "results", "weight_versions")
"""Lists of which all entries count."""
_ANY = ("id", "created", "request_id", "system_fingerprint", "tokens", "text")
"""Fields whose values differ from run to run."""


def completion(**changes: Any) -> dict[str, Any]:
    """Return a body of ``/v1/completions``, with the fields that the client sends."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 1.0,
        "seed": 1,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": [],
        "ignore_eos": True,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "request_id": "of-the-record",
    }
    return body | changes


def generation(**changes: Any) -> dict[str, Any]:
    """Return a body of ``/inference/v1/generate``. ``changes`` are to its ``sampling_params``, but for the prompt and the model."""
    outside = {name: changes.pop(name) for name in ("token_ids", "model") if name in changes}
    sampling = {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 1,
        "logprobs": 0,
        "stop_token_ids": [],
        "ignore_eos": True,
        "detokenize": False,
    }
    return {"request_id": "of-the-record", "token_ids": PROMPT, "sampling_params": sampling | changes} | outside


def reload(folder: object) -> dict[str, Any]:
    """Return the body of ``/collective_rpc`` that loads a folder."""
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}


def folders(model: str, root: Path) -> dict[str, Path]:
    """Write folders of weights to load: good ones, and ones with each fault."""
    tensors = load_file(Path(model) / "model.safetensors")
    one = "model.layers.0.self_attn.k_proj.weight"
    renamed = {("model.layers.0.foo.weight" if name == one else name): x for name, x in tensors.items()}
    written = {
        "good": {name: x * 1.01 for name, x in tensors.items()},
        "wrong name": renamed,
        "wrong shape": tensors | {"model.norm.weight": torch.ones(64)},
        "missing tensor": {name: x for name, x in tensors.items() if name != one},
        "not finite": tensors | {"lm_head.weight": tensors["lm_head.weight"] * torch.nan},
    }
    for name, content in written.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text((Path(model) / "config.json").read_text())
        save_file(content, root / name / "model.safetensors", {"format": "pt"})
    return {name: root / name for name in written} | {"missing": root / "missing"}


class Record:
    """Sends requests, and keeps the normalized answers.

    Args:
        call: sends one request.
        model: directory of the served model.
        root: empty directory, for folders of weights.
        long: tokens of an answer that takes about a second.
    """

    def __init__(self, call: Call, model: str, root: Path, *, long: int) -> None:
        self.call, self.model, self.long = call, model, long
        self.folders = folders(model, root)
        self.adapter, self.large = (adapter_dir(model, LoRAConfig(rank=rank, alpha=16)) for rank in (8, 16))
        self.paths = {str(root): "FOLDER", self.adapter: "ADAPTER", self.large: "LARGE", model: "MODEL"}
        self.rows: dict[str, Any] = {}
        self.threads = concurrent.futures.ThreadPoolExecutor(8)

    def row(self, name: str, route: str, body: Any = None, method: str | None = None) -> Any:
        """Send a request. Returns its answer."""
        return self.add(name, self.call(route, body, method))

    def add(self, name: str, answer: tuple[int, Any]) -> Any:
        """Keep an answer."""
        if name in self.rows:
            raise ValueError(f"two rows have the name {name!r}")
        self.rows[name] = {"status": answer[0], "body": normalized(answer[1], self.paths)}
        return answer[1]

    def start(self, route: str, body: Any) -> concurrent.futures.Future[tuple[int, Any]]:
        """Send a request in the background."""
        return self.threads.submit(self.call, route, body)

    def waits(self, name: str, answers: Iterable[concurrent.futures.Future[tuple[int, Any]]]) -> None:
        """Keep whether requests are not answered within half a second."""
        done, _ = concurrent.futures.wait(answers, timeout=0.5)
        self.rows[name] = {"waits": not done}


def normalized(value: Any, paths: dict[str, str], key: str = "") -> Any:
    """Return an answer without what differs from run to run. Of most lists, the first entry is left."""
    if key in _ANY:
        return "..."
    if key == "top_logprobs" and value and isinstance(value[0], dict) and "token_id" not in value[0]:
        return ["by text"]
    if isinstance(value, dict):
        return {name: normalized(each, paths, name) for name, each in value.items()}
    if isinstance(value, list):
        return [normalized(each, paths) for each in (value if key in _WHOLE else value[:1])]
    if isinstance(value, str):
        for path, name in sorted(paths.items(), key=lambda each: -len(each[0])):
            value = value.replace(path, name)
        # The order of a set's entries differs.
        return re.sub("(?s)The available parameters .*", "...", value)[:300]
    if isinstance(value, bool) or value is None:
        return value
    return type(value)(0)


def descriptions(record: Record) -> None:
    """Descriptions of the server: routes, settings, models, version."""
    status, body = record.call("/openapi.json")
    record.add("routes", (status, {"paths": sorted(body["paths"])} if status == 200 else body))
    status, body = record.call("/server_info?config_format=json")
    if status == 200:
        kept = ("logprobs_mode", "max_model_len", "dtype", "max_logprobs")
        body = {"vllm_config": {"model_config": {name: body["vllm_config"]["model_config"][name] for name in kept}}}
    record.add("server_info", (status, body))
    record.row("models", "/v1/models")
    record.row("version of the start", "/weight_info")
    record.row("set version", "/update_weight_version", {"new_version": "7"})
    record.row("version", "/weight_info")
    record.row("get_world_size", "/get_world_size")
    record.row("transfer not configured", "/init_weight_transfer_engine", {"init_info": {}})


def generations(record: Record) -> None:
    """Answers, and requests that are refused."""
    context, vocabulary = CONTEXT, VOCABULARY
    _set_version(record)
    for name, route, body, prompt in (
        ("completion", "/v1/completions", completion, "prompt"),
        ("generate", "/inference/v1/generate", generation, "token_ids"),
    ):
        record.row(name, route, body())
        stop = record.row(f"{name}, greedy", route, body(temperature=0.0))["choices"][0]["token_ids"][1]
        record.row(f"{name}, stop token", route, body(temperature=0.0, stop_token_ids=[stop]))
        record.row(f"{name}, prompt too long", route, body(**{prompt: [5] * (context + 1)}))
        record.row(f"{name}, prompt as long as the context", route, body(**{prompt: [5] * context}))
        record.row(f"{name}, answer beyond the context", route, body(**{prompt: [5] * (context - 2)}))
        record.row(f"{name}, token outside the vocabulary", route, body(**{prompt: [vocabulary]}))
        record.row(f"{name}, stop token outside the vocabulary", route, body(stop_token_ids=[vocabulary]))
        record.row(f"{name}, unknown model", route, body(model="no"))


def _set_version(record: Record) -> None:
    """Set the version that answers name, which earlier topics may have changed."""
    record.call("/update_weight_version", {"new_version": "7"})


def pauses(record: Record) -> None:
    """Pauses that return what is running, and pauses that keep it."""
    _set_version(record)
    record.row("is_paused, no", "/is_paused")
    record.row("pause, unknown mode", "/pause?mode=nothing", {}, "POST")
    running = [
        record.start("/v1/completions", completion(max_tokens=record.long)),
        record.start("/inference/v1/generate", generation(max_tokens=record.long)),
    ]
    time.sleep(0.4)
    record.row("pause, abort", "/pause?mode=abort", {}, "POST")
    record.add("completion, aborted", running[0].result())
    record.add("generate, aborted", running[1].result())
    record.row("is_paused, yes", "/is_paused")
    late = [
        record.start("/v1/completions", completion()),
        record.start("/inference/v1/generate", generation()),
    ]
    record.waits("requests after a pause", late)
    record.row("pause again", "/pause?mode=abort", {}, "POST")
    record.add("completion, aborted before the first token", late[0].result())
    record.add("generate, aborted before the first token", late[1].result())
    later = record.start("/v1/completions", completion())
    record.waits("request after the second pause", [later])
    record.row("resume", "/resume", {})
    record.add("completion, after resume", later.result())
    record.row("resume again", "/resume", {})

    running = [
        record.start("/v1/completions", completion(max_tokens=record.long)),
        record.start("/inference/v1/generate", generation(max_tokens=record.long)),
    ]
    time.sleep(0.4)
    record.row("pause, keep", "/pause?mode=keep", {}, "POST")
    record.waits("kept requests", running)
    late = [record.start("/inference/v1/generate", generation())]
    record.waits("request after a keeping pause", late)
    record.row("load while paused", "/collective_rpc", reload(record.folders["good"]))
    record.row("set version while paused", "/update_weight_version", {"new_version": "8"})
    record.row("resume kept", "/resume", {})
    record.add("completion, kept", running[0].result())
    record.add("generate, kept", running[1].result())
    record.add("generate, after a keeping pause", late[0].result())


def loads(record: Record) -> None:
    """Loads that succeed and fail. Good ones follow each failed one, before any forward."""
    folder = record.folders
    _set_version(record)
    record.row("load", "/collective_rpc", reload(folder["good"]))
    record.row("unknown method", "/collective_rpc", {"method": "no_such_method"})
    for name in ("missing", "wrong name", "wrong shape"):
        record.row(f"load, {name}", "/collective_rpc", reload(folder[name]))
        record.row(f"load after {name}", "/collective_rpc", reload(folder["good"]))
        record.row(f"second load after {name}", "/collective_rpc", reload(folder["good"]))
        record.row(f"completion after {name}", "/v1/completions", completion())
    record.row("load, missing tensor", "/collective_rpc", reload(folder["missing tensor"]))
    record.row("load, not finite", "/collective_rpc", reload(folder["not finite"]))
    record.row("completion, not finite", "/v1/completions", completion())
    record.row("generate, not finite", "/inference/v1/generate", generation())
    record.row("load after not finite", "/collective_rpc", reload(folder["good"]))
    record.row("completion, healed", "/v1/completions", completion())
    record.row("reset_prefix_cache", "/reset_prefix_cache", {})


def adapters(record: Record) -> None:
    """Adapters are loaded, replaced, used and removed."""
    adapter = record.adapter
    _set_version(record)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    record.row("load adapter", load, {"lora_name": "policy", "lora_path": adapter})
    record.row("load adapter again", load, {"lora_name": "policy", "lora_path": adapter})
    record.row("replace adapter", load, {"lora_name": "policy", "lora_path": adapter, "load_inplace": True})
    record.row("load adapter, missing", load, {"lora_name": "other", "lora_path": f"{adapter}-missing"})
    record.row("load adapter, rank too large", load, {"lora_name": "large", "lora_path": record.large})
    record.row("load adapter, no name", load, {"lora_path": adapter})
    record.row("models with an adapter", "/v1/models")
    record.row("completion of an adapter", "/v1/completions", completion(model="policy"))
    record.row("generate of an adapter", "/inference/v1/generate", generation(model="policy"))
    record.row("unload adapter", unload, {"lora_name": "policy"})
    record.row("unload adapter again", unload, {"lora_name": "policy"})


def sleeps(record: Record) -> None:
    """Sleep, without a flag of the server."""
    record.row("is_sleeping", "/is_sleeping")
    running = record.start("/v1/completions", completion(max_tokens=record.long))
    time.sleep(0.4)
    record.row("sleep", "/sleep?level=1", {}, "POST")
    record.add("completion, put to sleep", running.result())
    record.row("is_sleeping after sleep", "/is_sleeping")
    record.row("is_paused after sleep", "/is_paused")
    late = record.start("/v1/completions", completion())
    record.waits("request of a sleeping server", [late])
    record.row("wake_up", "/wake_up", {}, "POST")
    record.row("is_paused after wake_up", "/is_paused")
    record.add("completion after wake_up", late.result())


def death(record: Record, ended: Callable[[], bool]) -> None:
    """A failed load, and then a request. ``ended`` waits for the end of the process."""
    folder = record.folders
    record.row("load that fails", "/collective_rpc", reload(folder["wrong name"]))
    record.row("health after a failed load", "/health")
    record.row("forward after a failed load", "/v1/completions", completion())
    record.rows["ends after a failed load and a forward"] = {"ended": ended()}


def keys(record: Record, without_key: Call) -> None:
    """A server with a key and without scale-out. Only some routes need the key."""
    for name, call in (("with key", record.call), ("without key", without_key)):
        record.add(f"models, {name}", call("/v1/models"))
        record.add(f"completion, {name}", call("/v1/completions", completion()))
        record.add(f"generate, {name}", call("/inference/v1/generate", generation()))
        record.add(f"weight_info, {name}", call("/weight_info"))
        record.add(f"pause, {name}", call("/pause?mode=keep", {}))
        record.add(f"resume, {name}", call("/resume", {}))
        record.add(f"health, {name}", call("/health"))
    status, body = record.call("/openapi.json")
    record.rows["lists scale-out"] = {"listed": "/inference/v1/generate" in body["paths"], "status": status}


def recorded(file: Path = RECORDED) -> dict[str, Any]:
    """Return the recorded answers, by topic and name."""
    return json.loads(file.read_text()) if file.exists() else {}


def write(topic: str, rows: dict[str, Any], file: Path = RECORDED) -> None:
    """Write the recorded answers of a topic: one line for each answer."""
    topics = []
    for name, answers in {**recorded(file), topic: rows}.items():
        lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(row)}" for each, row in answers.items())
        topics.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    file.write_text("{\n" + ",\n".join(topics) + "\n}\n")


def differences(topic: str, rows: dict[str, Any], file: Path = RECORDED) -> list[str]:
    """Return the answers that differ from the recorded ones. Of the routes, those that are not in the record."""
    expected = recorded(file)[topic]
    found = [f"no answer {name!r}" for name in expected.keys() - rows.keys()]
    for name, row in rows.items():
        if name == "routes":
            found += [f"route {each}" for each in row["body"]["paths"] if each not in expected[name]["body"]["paths"]]
        elif name not in expected:
            found.append(f"{name!r} was never recorded: record the answers of the real server")
        elif row != expected[name]:
            found.append(f"{name!r}:\n  recorded {expected[name]}\n  answered {row}")
    return found


TOPICS = {each.__name__: each for each in (descriptions, generations, pauses, loads, adapters, sleeps)}
"""Topics that leave the server as it was, but for its weights and their version."""
