"""Weights over a process group into SGLang. Read, not run.

Sources, in the wheel of release 0.5.23: ``srt/entrypoints/http_server.py`` (routes and replies), ``srt/managers/io_struct.py`` (fields),
``srt/managers/scheduler_components/weight_updater.py`` (sessions), ``srt/model_executor/model_runner_components/weight_updater.py`` (group,
and the order of the broadcasts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.inference.http.servers.group_routes import INTERRUPTED
from areal.inference.http.servers.http_call import Anything, Empty, HTTPCall, LabelReply, ReplyBody, RequestBody, expect
from areal.inference.http.servers.sglang_schemas import SGLangServerInfo, SGLangSetLabel, SGLangSuccess


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
    """Routes of SGLang. There is one group at a time, and its name is that of the last :meth:`join`.

    Tensors are loaded in a session. Its start turns quantised weights into such as can be loaded, and its end packs them again.
    """

    packs = False

    workers = HTTPCall.get("/server_info", SGLangServerInfo)
    label = HTTPCall.get("/model_info", LabelReply)
    start = (HTTPCall("/begin_weight_update", Empty(), SGLangSuccess),)
    _end = HTTPCall("/end_weight_update", Empty(), SGLangSuccess)

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
        return (self._end, flush, HTTPCall("/update_weight_version", SGLangSetLabel(new_version=label), SGLangSuccess))

    @property
    def recover(self) -> Sequence[HTTPCall[ReplyBody]]:
        # The end fails if no session is open.
        label = SGLangSetLabel(new_version=INTERRUPTED)
        return (HTTPCall("/update_weight_version", label, SGLangSuccess), self._end)
