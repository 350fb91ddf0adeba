"""Weights over a process group into SGLang. Read, not run.

Sources: ``python/sglang/srt/entrypoints/http_server.py`` at ``0025436e`` (routes and replies), ``srt/managers/io_struct.py`` at
``f11d231c`` (fields), ``srt/model_executor/model_runner_components/weight_updater.py`` at ``027814ef`` (group, and the order of the
broadcasts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.inference.http.servers.base_schemas import Anything, Empty, ReplyBody, RequestBody
from areal.inference.http.servers.call import HTTPCall, expect
from areal.inference.http.servers.group_routes import INTERRUPTED
from areal.inference.http.servers.sglang_schemas import SGLangLabel, SGLangModelInfo


class SGLangServerInfo(ReplyBody):
    """Reply of ``GET /get_server_info``: arguments of the server."""

    tp_size: int = Field(ge=1)
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False


class SGLangSuccess(ReplyBody):
    """Reply of the routes of the group. A failure has status 400."""

    success: Literal[True]


class SGLangInitGroup(RequestBody):
    """``POST /init_weights_update_group``. The rank of a worker is ``rank_offset`` plus its tensor-parallel rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class SGLangDestroyGroup(RequestBody):
    """``POST /destroy_weights_update_group``."""

    group_name: str


class SGLangUpdateFromGroup(RequestBody):
    """``POST /update_weights_from_distributed``. The cache is flushed once, after the last tensors."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    flush_cache: Literal[False] = False


class SGLangGroupRoutes:
    """Routes of SGLang. Tensors are loaded in place. There is one group at a time, and its name is that of the last :meth:`join`."""

    packs = False

    workers = HTTPCall("/get_server_info", Empty(), SGLangServerInfo, method="GET")
    label = HTTPCall("/model_info", Empty(), SGLangModelInfo, method="GET")
    start: Sequence[HTTPCall[ReplyBody]] = ()

    def __init__(self) -> None:
        self._group = ""

    def read_workers(self, reply: ReplyBody) -> int:
        info = expect(SGLangServerInfo, reply)
        if info.pp_size > 1 or (info.dp_size > 1 and not info.enable_dp_attention):
            raise ValueError(
                f"pp_size = {info.pp_size}, dp_size = {info.dp_size}: SGLang's workers have ranks in such a group by tensor-parallel rank "
                "only; use tensor parallelism alone, or with enable_dp_attention"
            )
        return info.tp_size

    def read_label(self, reply: ReplyBody) -> str | None:
        return expect(SGLangModelInfo, reply).weight_version

    def join(
        self, where: Mapping[str, str | int], offset: int, size: int, packed_bytes: int | None
    ) -> HTTPCall[SGLangSuccess]:
        if packed_bytes is not None:
            raise ValueError(f"packed_bytes = {packed_bytes}: packed buffers are those of vLLM; leave it None")
        self._group = str(where["group_name"])
        body = SGLangInitGroup.model_validate({**where, "rank_offset": offset, "world_size": size})
        return HTTPCall("/init_weights_update_group", body, SGLangSuccess)

    @property
    def leave(self) -> Sequence[HTTPCall[SGLangSuccess]]:
        body = SGLangDestroyGroup(group_name=self._group)
        return (HTTPCall("/destroy_weights_update_group", body, SGLangSuccess),)

    def update(self, specs: Sequence[TensorSpec]) -> HTTPCall[SGLangSuccess]:
        body = SGLangUpdateFromGroup(
            names=[spec.name for spec in specs],
            dtypes=[str(spec.dtype).removeprefix("torch.") for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            group_name=self._group,
        )
        return HTTPCall("/update_weights_from_distributed", body, SGLangSuccess)

    def finish(self, label: str) -> Sequence[HTTPCall[ReplyBody]]:
        # Keys and values of the old weights must not be used again. The reply is text.
        flush = HTTPCall("/flush_cache", Empty(), Anything)
        return (flush, HTTPCall("/update_weight_version", SGLangLabel(new_version=label), SGLangSuccess))

    @property
    def recover(self) -> Sequence[HTTPCall[ReplyBody]]:
        return (HTTPCall("/update_weight_version", SGLangLabel(new_version=INTERRUPTED), SGLangSuccess),)
