"""SGLang servers."""

from __future__ import annotations

from collections.abc import Sequence

from areal.inference.http.servers.base_schemas import Anything, Empty, OpenAPI, ReplyBody
from areal.inference.http.servers.call import HTTPCall, expect
from areal.inference.http.servers.dialect import Ask, ReplyPart
from areal.inference.http.servers.sglang_group import SGLangGroupRoutes
from areal.inference.http.servers.sglang_schemas import (
    SGLangAbort,
    SGLangGenerate,
    SGLangGenerated,
    SGLangLabel,
    SGLangMemory,
    SGLangModelInfo,
    SGLangPause,
    SGLangSampling,
    SGLangUpdated,
    SGLangUpdateFromDisk,
)
from areal.inference.protocol import FinishReason, Sampling


class SGLang:
    """SGLang servers.

    Their log-probs are computed after temperature but before ``top_p`` and ``top_k``, so both are refused. The server must run without
    ``SGLANG_RETURN_ORIGINAL_LOGPROB``. It respects seeds only with ``--enable-deterministic-inference``.

    With ``stop_token_ids``, the model's end-of-sequence tokens end a request too. The client then continues the answer.

    To sleep, they need ``--enable-memory-saver``.

    Args:
        weights_backup: the servers run with ``--enable-weights-cpu-backup``. Otherwise their weights do not survive a sleep, and the servers
            get no requests until the next update.
    """

    adapter = None
    group = SGLangGroupRoutes()

    def __init__(self, *, weights_backup: bool = False) -> None:
        self._weights_backup = weights_backup

    def check(self, sampling: Sampling) -> None:
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            raise ValueError(
                f"Sampling.top_p = {sampling.top_p} and top_k = {sampling.top_k}: SGLang's log-probs are those before both, not of the "
                "distribution that it draws from; leave them at 1 and 0"
            )

    async def examine(self, ask: Ask) -> SGLangRoutes:
        offered = await ask(HTTPCall.get("/openapi.json", OpenAPI))
        paths = offered.paths if offered is not None else {}
        labels = {"/model_info", "/update_weight_version"} <= set(paths)
        return SGLangRoutes(weights_backup=self._weights_backup, labels=labels)


class SGLangRoutes:
    """Requests of one SGLang server; see :class:`~areal.inference.http.servers.dialect.Routes`.

    Args:
        weights_backup: its weights survive a sleep.
        labels: it has the routes for labels.
    """

    pause = interrupt = HTTPCall("/pause_generation", SGLangPause(), Anything)
    resume = HTTPCall("/continue_generation", Empty(), Anything)
    sleep = HTTPCall("/release_memory_occupation", SGLangMemory(), Anything)
    wake = HTTPCall("/resume_memory_occupation", SGLangMemory(), Anything)
    keeps_requests = False
    max_context = serves = None

    def __init__(self, *, weights_backup: bool, labels: bool) -> None:
        self.keeps_weights = weights_backup
        self.label = HTTPCall.get("/model_info", SGLangModelInfo) if labels else None

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[SGLangGenerated]:
        drawn = SGLangSampling(
            max_new_tokens=sampling.max_new_tokens - generated,
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=-1,
            stop_token_ids=list(sampling.stop_token_ids or ()),
            ignore_eos=sampling.stop_token_ids == (),  # it would disable stop_token_ids too
            sampling_seed=seed,  # the server combines it with the position
        )
        body = SGLangGenerate(rid=name, input_ids=list(prompt), sampling_params=drawn)
        return HTTPCall("/generate", body, SGLangGenerated)

    def read_reply(self, reply: ReplyBody) -> ReplyPart:
        meta = expect(SGLangGenerated, reply).meta_info
        finish: FinishReason = "aborted" if meta.finish_reason.type == "abort" else meta.finish_reason.type
        # An aborted request may lack the list; any other must have one entry per token.
        entries = meta.output_token_logprobs
        if entries is None and finish != "aborted":
            raise ValueError("meta_info.output_token_logprobs is missing")
        if entries is not None and meta.completion_tokens not in (None, len(entries)):
            raise ValueError(
                f"meta_info.completion_tokens = {meta.completion_tokens}, and output_token_logprobs has {len(entries)} entries"
            )
        # The label at the end of the request, which does not run across an update.
        label = meta.weight_version
        return ReplyPart(
            tuple(token for _, token, _ in entries or ()),
            tuple(logprob for logprob, _, _ in entries or ()),
            finish,
            None if label is None else (label,) * len(entries or ()),
        )

    def blames_weights(self, rejection: str) -> bool:
        return False

    def abort(self, name: str) -> HTTPCall[ReplyBody]:
        return HTTPCall("/abort_request", SGLangAbort(rid=name), Anything)

    def load(self, folder: str, label: str) -> HTTPCall[SGLangUpdated]:
        body = SGLangUpdateFromDisk(model_path=folder, weight_version=label)
        return HTTPCall("/update_weights_from_disk", body, SGLangUpdated)

    def check_loaded(self, reply: ReplyBody) -> None:
        updated = expect(SGLangUpdated, reply)
        if not updated.success:
            raise ValueError(f"success is false: {updated.message}")

    def read_label(self, reply: ReplyBody) -> str | None:
        return expect(SGLangModelInfo, reply).weight_version

    def set_label(self, label: str) -> HTTPCall[ReplyBody]:
        return HTTPCall("/update_weight_version", SGLangLabel(new_version=label), Anything)
