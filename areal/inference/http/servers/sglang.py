"""SGLang servers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from safetensors import safe_open

from areal.engine.checkpoint.safetensors import TensorSpec
from areal.inference.http.servers.dialect import (
    Ask,
    LabelRoutes,
    PauseRoutes,
    ReplyPart,
    ServedModel,
    SleepRoutes,
    expect,
    labels_of,
)
from areal.inference.http.servers.group_routes import INTERRUPTED
from areal.inference.http.servers.http_call import (
    Anything,
    Empty,
    HTTPCall,
    LabelReply,
    ModelList,
    ReplyBody,
    RequestBody,
)
from areal.inference.http.servers.routed_experts import of_int32
from areal.inference.http.servers.sglang_schemas import (
    SGLangAbort,
    SGLangGenerate,
    SGLangGenerated,
    SGLangLoadAdapter,
    SGLangMemory,
    SGLangMeta,
    SGLangPause,
    SGLangSampling,
    SGLangServerInfo,
    SGLangSetLabel,
    SGLangSuccess,
    SGLangUnloadAdapter,
    SGLangUpdateFromDisk,
)
from areal.inference.protocol import FinishReason, Sampling, TopTokens

_OLDEST = (0, 5, 23)
"""Oldest release that is supported. Releases before it do not name the weights of each token, or have other routes."""

_FACTOR = ".lora_A.weight"

_ABORT = HTTPCall("/pause_generation", SGLangPause(mode="abort"), Anything)
_RETRACT = HTTPCall("/pause_generation", SGLangPause(mode="retract"), Anything)
_CONTINUE = HTTPCall("/continue_generation", Empty(), Anything)


class SGLang:
    """SGLang servers of release 0.5.23 or newer, which must run without ``SGLANG_RETURN_ORIGINAL_LOGPROB``.

    They respect seeds only with ``--enable-deterministic-inference``. With ``top_p`` or ``top_k``, log-probs are those of the distribution
    over the tokens that these leave. An answer with ``--sampling-mask-max-tokens`` of them at a position, or more, is a RuntimeError.

    An update of the model returns running requests to the queue, and they go on with the new weights. One of an adapter interrupts them.

    With ``stop_token_ids``, the model's end-of-sequence tokens end a request too. The client then continues the answer.

    To sleep, they need ``--enable-memory-saver``.

    Args:
        weights_backup: the servers run with ``--enable-weights-cpu-backup``. Otherwise their weights do not survive a sleep, and the servers
            get no requests until the next update.
        adapter: name under which updates load the engine's adapter, in place of the model's weights. Servers need ``--enable-lora``,
            ``--max-lora-rank`` and ``--lora-target-modules``. Before the first update, the model answers.
        routed_experts: number of experts that the model sends a token to. With it, answers have the experts of each token, for training to
            replay. Servers need ``--enable-return-routed-experts``.
    """

    def __init__(
        self, *, weights_backup: bool = False, adapter: str | None = None, routed_experts: int | None = None
    ) -> None:
        if routed_experts is not None and routed_experts < 1:
            raise ValueError(f"SGLang.routed_experts = {routed_experts}: pass the model's num_experts_per_tok")
        self._weights_backup, self.adapter, self._routed_experts = weights_backup, adapter, routed_experts

    @property
    def group(self) -> SGLangGroupRoutes:
        return SGLangGroupRoutes()  # which know the name of one rollout's group

    def check(self, sampling: Sampling) -> None:
        return None  # everything can be drawn

    async def examine(self, ask: Ask) -> SGLangRoutes:
        info = await ask(HTTPCall.get("/server_info", SGLangServerInfo))
        release = () if info is None else tuple(int(each) for each in re.findall(r"\d+", info.version)[:3])
        # Builds without a tag are 0.0.0.
        if info is None or (release[:2] != (0, 0) and release < _OLDEST):
            found = "a release without /server_info" if info is None else info.version
            raise ValueError(f"SGLang {found}: install {'.'.join(map(str, _OLDEST))} or newer on the server")
        if self.adapter is not None and not info.enable_lora:
            raise ValueError(
                f"SGLang.adapter = {self.adapter!r}: the server cannot load adapters; start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules"
            )
        listed = await ask(HTTPCall.get("/v1/models", ModelList))
        lengths = [card.max_model_len for card in listed.data if card.parent is None] if listed is not None else []
        # A few tokens less than the context: longer prompts are refused, also those that continue an answer, and longer answers are cut.
        context = min((each for each in (*lengths[:1], info.max_req_input_len) if each is not None), default=None)
        # It loads a directory with another name, keeps the old values, and ends at another shape.
        served = ServedModel(info.model_path, context, checks_weights=False, quantization=info.quantization or "")
        return SGLangRoutes(
            self.adapter,
            served,
            weights_backup=self._weights_backup,
            mask_tokens=info.sampling_mask_max_tokens,
            routed_experts=self._routed_experts,
        )


class SGLangRoutes:
    """Requests of one SGLang server; see :class:`~areal.inference.http.servers.dialect.Routes`.

    Args:
        adapter: name under which updates load an adapter.
        served: what the server tells of its model.
        weights_backup: its weights survive a sleep.
        mask_tokens: largest number of tokens in a sampling mask.
        routed_experts: experts of a token, of which replies must have the numbers; ``None`` without.
    """

    labels = LabelRoutes(
        HTTPCall.get("/model_info", LabelReply),
        lambda label: HTTPCall("/update_weight_version", SGLangSetLabel(new_version=label), Anything),
    )

    def __init__(
        self,
        adapter: str | None,
        served: ServedModel,
        *,
        weights_backup: bool,
        mask_tokens: int,
        routed_experts: int | None = None,
    ) -> None:
        self._adapter, self.served, self._mask_tokens = adapter, served, mask_tokens
        self._routed_experts = routed_experts
        self._loaded: str | None = None  # adapter that answers
        # A request keeps its adapter to its end, and the next one cannot be loaded before.
        keeps = adapter is None
        self.pauses = PauseRoutes(_RETRACT if keeps else _ABORT, _ABORT, _CONTINUE, keeps_requests=keeps)
        self.sleeps = SleepRoutes(
            HTTPCall("/release_memory_occupation", SGLangMemory(), Anything),
            HTTPCall("/resume_memory_occupation", SGLangMemory(), Anything),
            keeps_weights=weights_backup,
        )

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[SGLangGenerated]:
        truncated = _is_truncated(sampling)
        drawn = SGLangSampling(
            max_new_tokens=sampling.max_new_tokens - generated,
            temperature=sampling.temperature,
            top_p=sampling.top_p if truncated else 1.0,
            # A mask needs a limit. An answer at which it changes the distribution is refused.
            top_k=(sampling.top_k or self._mask_tokens) if truncated else -1,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids or ()),
            ignore_eos=sampling.stop_token_ids == (),  # it would disable stop_token_ids too
            sampling_seed=seed,  # the server combines it with the position
        )
        body = SGLangGenerate(
            rid=name,
            input_ids=list(prompt),
            sampling_params=drawn,
            top_logprobs_num=None if truncated else sampling.top_logprobs or None,
            return_sampling_mask=True if truncated else None,
            sampling_logprobs_mode="support" if truncated and sampling.top_logprobs else None,
            lora_path=self._loaded,
            return_routed_experts=True if self._routed_experts else None,
        )
        return HTTPCall("/generate", body, SGLangGenerated)

    def read_reply(self, reply: ReplyBody, sampling: Sampling) -> ReplyPart:
        meta = expect(SGLangGenerated, reply).meta_info
        finish: FinishReason = "aborted" if meta.finish_reason.type == "abort" else meta.finish_reason.type
        entries = meta.output_token_logprobs
        truncated = _is_truncated(sampling)
        # Only an aborted request may lack log-probs, and then its tokens cannot be used.
        lacks = entries is None or (truncated and meta.output_token_sampling_logprobs is None)
        if lacks and finish != "aborted":
            name = "output_token_logprobs" if entries is None else "output_token_sampling_logprobs"
            raise ValueError(f"meta_info.{name} is missing")
        if entries is None or lacks:
            return ReplyPart((), (), finish, ())
        if meta.completion_tokens not in (None, len(entries)):
            raise ValueError(
                f"meta_info.completion_tokens = {meta.completion_tokens}, and output_token_logprobs has {len(entries)} entries"
            )
        tokens = tuple(token for _, token, _ in entries)
        logprobs = tuple(map(_number, (logprob for logprob, _, _ in entries)))
        top: tuple[TopTokens, ...] = ()
        if truncated:
            masks = meta.output_token_sampling_mask or []
            if not sampling.top_k and any(len(mask) >= self._mask_tokens for mask in masks):
                raise ValueError(
                    f"top_p = {sampling.top_p:g} leaves {self._mask_tokens} tokens or more: start the server with a larger "
                    "--sampling-mask-max-tokens, or set Sampling.top_k"
                )
            logprobs, top = _of_support(tokens, meta, sampling.top_logprobs)
        elif sampling.top_logprobs:
            rows = meta.output_top_logprobs or []
            top = tuple(TopTokens(tuple(t for _, t, _ in row), tuple(_number(p) for p, _, _ in row)) for row in rows)
        stop_string = isinstance(meta.finish_reason.matched, str)
        experts = None
        if self._routed_experts and tokens:
            computed = (meta.prompt_tokens or 0) + len(tokens) - 1
            experts = of_int32(meta.routed_experts, computed, self._routed_experts, "meta_info.routed_experts")
        return ReplyPart(tokens, logprobs, finish, labels_of(meta.weight_versions), top, stop_string, experts)

    def abort(self, name: str) -> HTTPCall[ReplyBody]:
        return HTTPCall("/abort_request", SGLangAbort(rid=name), Anything)

    def load(self, folder: str, label: str) -> Sequence[HTTPCall[ReplyBody]]:
        if self._adapter is None:
            body = SGLangUpdateFromDisk(model_path=folder, weight_version=label)
            return (HTTPCall("/update_weights_from_disk", body, SGLangSuccess),)
        _check_layers(folder)
        # A server whose load fails gets no requests.
        self._loaded = self._adapter
        return (
            HTTPCall("/unload_lora_adapter", SGLangUnloadAdapter(lora_name=self._adapter), SGLangSuccess),
            HTTPCall("/load_lora_adapter", SGLangLoadAdapter(lora_name=self._adapter, lora_path=folder), SGLangSuccess),
        )


_NEEDS = {"q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}
"""Layers without which SGLang cannot stack the adapter of a layer."""


def _check_layers(folder: str) -> None:
    """Raise if an adapter lacks a layer that SGLang stacks with another one.

    The server refuses ``q_proj`` without ``v_proj``, with the name of a tensor. The other cases end it at the next request.

    Raises:
        ValueError: it does; names both layers.
    """
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        return  # the server says so
    with safe_open(file, "pt") as tensors:
        layers = {name.removesuffix(_FACTOR) for name in tensors.keys() if name.endswith(_FACTOR)}  # noqa: SIM118 - no mapping
    for layer in sorted(layers):
        stem, _, name = layer.rpartition(".")
        for needed in _NEEDS.get(name, ()):
            if f"{stem}.{needed}" not in layers:
                raise ValueError(
                    f"{folder}: the adapter has {layer.removeprefix('base_model.model.')!r} without {needed!r}, and SGLang stacks both: add "
                    f"{needed!r} to lora.target_modules"
                )


def _number(logprob: float | None) -> float:
    """Return a log-prob, which is missing if the weights are not finite."""
    return math.nan if logprob is None else logprob


def _is_truncated(sampling: Sampling) -> bool:
    """Return whether ``top_p`` or ``top_k`` changes the distribution. A greedy answer has log-probs at temperature 1 over all tokens."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _of_support(tokens: Sequence[int], meta: SGLangMeta, count: int) -> tuple[tuple[float, ...], tuple[TopTokens, ...]]:
    """Return the log-probs of tokens under the distribution over the tokens that ``top_p`` and ``top_k`` leave, and the most likely ones.

    Args:
        tokens: sampled tokens.
        meta: reply to a request for the tokens that are left, and their log-probs if ``count`` is not 0.
        count: number of the most likely tokens.

    Raises:
        ValueError: a sampled token is not one of those that are left, or the lengths differ.
    """
    masks, values = meta.output_token_sampling_mask or [], meta.output_token_sampling_logprobs or []
    if not len(masks) == len(values) == len(tokens):
        raise ValueError(
            f"{len(tokens)} tokens came with sampling masks of {len(masks)} and log-probs of {len(values)}"
        )
    logprobs: list[float] = []
    top: list[TopTokens] = []
    for token, mask, value in zip(tokens, masks, values, strict=True):
        if token not in mask:
            raise ValueError(f"token {token} is not in its sampling mask")
        # One value is that of the sampled token.
        selected = value if isinstance(value, list) else [value if each == token else 0.0 for each in mask]
        row = [_number(each) for each in selected]
        logprobs.append(row[mask.index(token)])
        ordered = sorted(zip(mask, row, strict=True), key=lambda entry: -entry[1])[:count]
        top += [TopTokens(tuple(t for t, _ in ordered), tuple(p for _, p in ordered))] if count else []
    return tuple(logprobs), tuple(top)


# ---- weights over a process group
#
# After the wheel of release 0.5.23, and run over gloo: ``srt/entrypoints/http_server.py`` (routes and replies),
# ``srt/managers/io_struct.py`` (fields), ``srt/managers/scheduler_components/weight_updater.py`` (sessions),
# ``srt/model_executor/model_runner_components/weight_updater.py`` (group, and the order of the broadcasts).


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
