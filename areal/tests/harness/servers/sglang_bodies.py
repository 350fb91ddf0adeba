"""Bodies of requests to the test server with the routes of SGLang, independent of those that the client writes.

After the wheel of release 0.5.23: ``srt/managers/io_struct.py`` and ``srt/sampling/sampling_params.py``, with their defaults.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Body of a request. Unknown fields are errors here, to find misspelt ones; SGLang ignores them."""

    model_config = ConfigDict(extra="forbid")


class SamplingParams(Body):
    """``sampling_params`` of ``/generate``."""

    max_new_tokens: int = Field(default=128, ge=0)
    stop: list[str] = Field(default=[], max_length=32)
    stop_token_ids: list[int] = []
    temperature: float = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: Literal[0, 0.0] = 0
    frequency_penalty: Literal[0, 0.0] = 0
    presence_penalty: Literal[0, 0.0] = 0
    repetition_penalty: Literal[1, 1.0] = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int


class Generate(Body):
    """``POST /generate``."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: Literal[True]
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: int = Field(default=0, ge=0)
    return_sampling_mask: bool = False
    sampling_logprobs_mode: Literal["selected", "support"] | None = None
    lora_path: str | None = None
    stream: Literal[False] = False


class Pause(Body):
    """``POST /pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateFromDisk(Body):
    """``POST /update_weights_from_disk``."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: Literal[False] = False
    weight_version: str | None = None
    flush_cache: bool = True


class SetVersion(Body):
    """``POST /update_weight_version``."""

    new_version: str
    abort_all_requests: bool = True


class Abort(Body):
    """``POST /abort_request``."""

    rid: str = ""
    abort_all: Literal[False] = False


class Memory(Body):
    """``POST /release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: list[str] | None = None


class LoadAdapter(Body):
    """``POST /load_lora_adapter``."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapter(Body):
    """``POST /unload_lora_adapter``."""

    lora_name: str


class Tokenize(Body):
    """``POST /tokenize``."""

    model: str = "default"
    prompt: str
    add_special_tokens: bool = True


Nothing: Any = Body
"""Of routes without arguments."""
