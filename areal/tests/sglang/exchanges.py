"""Requests whose answers are recorded: the same are sent to a real SGLang and to the test server.

Each function sends the requests of one topic, and keeps the normalized answers by name.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api import LoRAConfig
from areal.inference.http.servers.sglang_schemas import SGLangMeta, SGLangServerInfo
from areal.tests.grid.models import adapter_dir
from areal.tests.vllm.exchanges import PROMPT, Call, Record
from areal.tests.vllm.server import CONTEXT, VOCABULARY

RECORDED = Path(__file__).with_name("recorded.json")
_MODEL = (
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "is_generation",
    "weight_version",
    "load_format",
    "model_type",
)
_READ = {
    "meta_info": ("id", "prompt_tokens", "weight_version", *SGLangMeta.model_fields),
    "finish_reason": ("type", "matched", "length", "message"),
}
"""Fields of parts of an answer that count. The rest are measurements."""


def record_of(call: Call, model: str, root: Path, *, long: int) -> Record:
    """Return a record. Arguments as for :class:`~areal.tests.vllm.exchanges.Record`."""
    record = Record(call, model, root / "folders", long=long)
    # SGLang takes adapters that list their layers, and have these two together.
    lora = {rank: LoRAConfig(rank=rank, alpha=16, target_modules=("q_proj", "v_proj")) for rank in (8, 16)}
    record.adapter, record.large = (adapter_dir(model, each) for each in lora.values())
    record.paths = {record.adapter: "ADAPTER", record.large: "LARGE", **record.paths}
    return record


def body(**changes: Any) -> dict[str, Any]:
    """Return a body of ``/generate``, with the fields that the client sends. ``changes`` are to its ``sampling_params``, but for some."""
    names = ("rid", "input_ids", "top_logprobs_num", "return_sampling_mask", "sampling_logprobs_mode", "lora_path")
    outside = {name: changes.pop(name) for name in names if name in changes}
    sampling = {
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": 1,
    }
    common = {"rid": "of-the-record", "input_ids": PROMPT, "return_logprob": True, "logprob_start_len": -1}
    return {**common, "stream": False, "sampling_params": sampling | changes} | outside


def _read(answer: Any) -> Any:
    """Return an answer with the fields that count."""
    if not isinstance(answer, dict):
        # The words of a flushed cache.
        return answer.partition("\n")[0] if isinstance(answer, str) else answer
    if answer.get("object") == "error":
        return {"object": "error"}  # with a traceback in the message
    kept = {}
    for name, value in answer.items():
        if name in ("rid", "http_worker_ipc", "text"):
            continue
        read = _READ.get(name)
        kept[name] = _read({each: value[each] for each in read if each in value} if read else value)
    return kept


def row(record: Record, name: str, route: str, sent: Any = None) -> Any:
    """Send a request. Returns its answer."""
    return add(record, name, record.call(route, sent))


def add(record: Record, name: str, answer: tuple[int, Any]) -> Any:
    """Keep an answer."""
    record.add(name, (answer[0], _read(answer[1])))
    return answer[1]


def _set_version(record: Record) -> None:
    """Set the version that answers name, which earlier tests may have changed, and remove their adapter."""
    record.call("/unload_lora_adapter", {"lora_name": "policy"})
    record.call("/update_weights_from_disk", {"model_path": record.model, "weight_version": "7"})


def descriptions(record: Record) -> None:
    """Descriptions of the server: arguments, models, version."""
    _set_version(record)
    status, answer = record.call("/server_info")
    add(record, "server_info", (status, {name: answer[name] for name in SGLangServerInfo.model_fields}))
    status, answer = record.call("/model_info")
    add(record, "model_info", (status, {name: answer[name] for name in _MODEL}))
    row(record, "models", "/v1/models")
    row(record, "health", "/health")
    row(record, "set version", "/update_weight_version", {"new_version": "8", "abort_all_requests": False})
    row(record, "answer under it", "/generate", body())
    row(record, "flush cache", "/flush_cache", {})


def generations(record: Record) -> None:
    """Answers, and requests that are refused."""
    _set_version(record)
    masked = {"top_k": 3, "return_sampling_mask": True}
    row(record, "answer", "/generate", body())
    stop = row(record, "greedy", "/generate", body(temperature=0.0, top_logprobs_num=2))["output_ids"][1]
    row(record, "stop token", "/generate", body(temperature=0.0, ignore_eos=False, stop_token_ids=[stop]))
    row(record, "mask", "/generate", body(**masked))
    row(record, "mask and its log-probs", "/generate", body(**masked, sampling_logprobs_mode="support"))
    row(record, "greedy mask", "/generate", body(temperature=0.0, return_sampling_mask=True))
    row(record, "log-probs of no mask", "/generate", body(sampling_logprobs_mode="support"))
    row(record, "prompt too long", "/generate", body(input_ids=[5] * (CONTEXT + 1)))
    row(record, "prompt as long as the context", "/generate", body(input_ids=[5] * CONTEXT))
    row(record, "answer beyond the context", "/generate", body(input_ids=[5] * (CONTEXT - 2)))
    row(
        record,
        "prompt in the last tokens of the context",
        "/generate",
        body(input_ids=[5] * (CONTEXT - 6), max_new_tokens=1),
    )
    row(record, "prompt before them", "/generate", body(input_ids=[5] * (CONTEXT - 7), max_new_tokens=1))
    cut = row(record, "answer that is cut", "/generate", body(input_ids=[5] * (CONTEXT - 10), max_new_tokens=10))
    record.rows["length of the answer that is cut"] = {"tokens": len(cut["output_ids"])}
    row(record, "mask without a limit", "/generate", body(top_p=0.5, return_sampling_mask=True))
    row(record, "mask with too high a limit", "/generate", body(top_k=4097, return_sampling_mask=True))
    row(record, "token outside the vocabulary", "/generate", body(input_ids=[5, VOCABULARY]))
    row(record, "empty prompt", "/generate", body(input_ids=[]))
    row(record, "temperature", "/generate", body(temperature=-1))
    row(record, "seed", "/generate", body(sampling_seed=2**63))
    row(record, "stop string without a tokenizer", "/generate", body(stop=["x"]))
    row(record, "unknown adapter", "/generate", body(lora_path="no"))


def pauses(record: Record) -> None:
    """Pauses that return what is running, and pauses that put it back into the queue."""
    _set_version(record)
    pause, resume = "/pause_generation", "/continue_generation"
    long = {"max_new_tokens": record.long}

    def running() -> list[Any]:
        some = [
            record.start("/generate", body(rid="plain", **long)),
            record.start("/generate", body(rid="masked", top_k=3, return_sampling_mask=True, **long)),
        ]
        time.sleep(0.8)
        return some

    row(record, "pause, unknown mode", pause, {"mode": "nothing"})
    some = running()
    row(record, "pause, abort", pause, {"mode": "abort"})
    for name, one in zip(("plain", "masked"), some, strict=True):
        add(record, f"aborted, {name}", one.result())
    late = record.start("/generate", body(rid="late"))
    record.waits("request after a pause", [late])
    row(record, "pause again", pause, {"mode": "abort"})
    record.waits("request after the second pause", [late])
    row(record, "continue", resume, {})
    add(record, "answer after the pause", late.result())
    row(record, "continue again", resume, {})

    some = running()
    row(record, "pause, retract", pause, {"mode": "retract"})
    record.waits("requests in the queue", some)
    load = {"model_path": str(record.folders["good"]), "weight_version": "8", "flush_cache": True}
    row(record, "load while paused", "/update_weights_from_disk", load)
    row(record, "continue after a load", resume, {})
    for name, one in zip(("plain", "masked"), some, strict=True):
        add(record, f"answer across a load, {name}", one.result())

    some = running()
    row(record, "pause, retract before an abort", pause, {"mode": "retract"})
    row(record, "abort of the queue", pause, {"mode": "abort"})
    for name, one in zip(("plain", "masked"), some, strict=True):
        status, answer = one.result()
        meta = answer["meta_info"]
        record.rows[f"aborted in the queue, {name}"] = {
            "status": status,
            "finish_reason": _read(meta)["finish_reason"],
            # Those that the scheduler has passed on.
            "fifties": len(answer["output_ids"]) % 50 == 0,
            "with log-probs": len(answer["output_ids"]) == len(meta["output_token_logprobs"]),
            "masks": "output_token_sampling_mask" in meta,
        }
    row(record, "continue at last", resume, {})
    one = record.start("/generate", body(rid="single", **long))
    time.sleep(0.8)
    row(record, "abort request", "/abort_request", {"rid": "single"})
    add(record, "aborted request", one.result())
    row(record, "abort of no request", "/abort_request", {"rid": "unknown"})


def loads(record: Record) -> None:
    """Loads that succeed and fail, and those that should fail."""
    _set_version(record)
    for name in ("good", "missing", "wrong name", "missing tensor", "not finite"):
        load = {"model_path": str(record.folders[name]), "weight_version": name}
        row(record, f"load, {name}", "/update_weights_from_disk", load)
        row(record, f"answer after {name}", "/generate", body())
    _set_version(record)


def sessions(record: Record) -> None:
    """Sessions in which weights are sent over a process group."""
    row(record, "begin", "/begin_weight_update", {})
    row(record, "begin again", "/begin_weight_update", {})
    row(record, "end", "/end_weight_update", {})
    row(record, "end again", "/end_weight_update", {})
    row(record, "leave no group", "/destroy_weights_update_group", {"group_name": "none"})


def adapters(record: Record) -> None:
    """Adapters are loaded, used and removed."""
    _set_version(record)
    load, unload = "/load_lora_adapter", "/unload_lora_adapter"
    row(record, "unload adapter, none", unload, {"lora_name": "policy"})
    row(record, "load adapter", load, {"lora_name": "policy", "lora_path": record.adapter})
    row(record, "load adapter again", load, {"lora_name": "policy", "lora_path": record.adapter})
    row(record, "load adapter, missing", load, {"lora_name": "other", "lora_path": f"{record.adapter}-missing"})
    row(record, "load adapter, rank too large", load, {"lora_name": "large", "lora_path": record.large})
    row(record, "load adapter, no name", load, {"lora_path": record.adapter})
    row(record, "models with an adapter", "/v1/models")
    row(record, "answer of an adapter", "/generate", body(lora_path="policy"))
    one = record.start("/generate", body(rid="adapter", lora_path="policy", max_new_tokens=record.long))
    time.sleep(0.8)
    row(record, "unload adapter", unload, {"lora_name": "policy"})
    done, _ = concurrent.futures.wait([one], timeout=0.3)
    record.rows["unloading waits for the answers of the adapter"] = {"done": bool(done)}
    add(record, "answer of an adapter to its end", one.result())
    row(record, "unload adapter again", unload, {"lora_name": "policy"})
    row(record, "answer of an adapter that is gone", "/generate", body(lora_path="policy"))


def death(record: Record, ended: Callable[[], bool]) -> None:
    """A load of another shape. ``ended`` waits for the end of the process."""
    load = {"model_path": str(record.folders["wrong shape"])}
    try:
        status = record.call("/update_weights_from_disk", load)[0]
    except OSError:
        status = None
    record.rows["wrong shape"] = {"status": status, "ended": ended()}


TOPICS = {each.__name__: each for each in (descriptions, generations, pauses, loads, adapters)}
"""Topics that leave the server as it was, but for its weights and their version."""
