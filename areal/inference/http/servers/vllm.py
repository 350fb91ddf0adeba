"""vLLM servers: the check at the first contact, and requests with text routes or, where offered, with token routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from areal.inference.http.servers.base_schemas import Anything, Empty, OpenAPI, ReplyBody
from areal.inference.http.servers.call import HTTPCall, expect
from areal.inference.http.servers.dialect import Ask, ReplyPart
from areal.inference.http.servers.vllm_group import VLLMGroupRoutes
from areal.inference.http.servers.vllm_schemas import (
    VLLMCard,
    VLLMCompleted,
    VLLMCompletion,
    VLLMGenerate,
    VLLMGenerated,
    VLLMLabel,
    VLLMLoadAdapter,
    VLLMModels,
    VLLMPaused,
    VLLMReload,
    VLLMReloadArguments,
    VLLMReloaded,
    VLLMResumed,
    VLLMSampling,
    VLLMServerInfo,
    VLLMWeightInfo,
)
from areal.inference.protocol import FinishReason, Sampling
from areal.utils.seeding import mixed

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, unless it is 0."""

_NOTHING = -9999.0
"""Log-prob in vLLM's JSON of what is not finite."""


class VLLM:
    """vLLM servers.

    They must be started with ``VLLM_SERVER_DEV_MODE=1``, which enables the routes for weights, and with ``--logprobs-mode
    processed_logprobs``, which computes log-probs after temperature, ``top_p`` and ``top_k``. A server that reports another mode is refused.

    With ``--enable-scale-out``, requests go to ``/inference/v1/generate`` and run on across updates of the model: nothing is sent twice, and
    the server names the weights of each token. Otherwise they go to ``/v1/completions``, and an update interrupts them, as one of an adapter
    does in any case.

    With ``Sampling.stop_token_ids=None``, answers also end at the end-of-sequence token of the server's tokenizer.

    To sleep, they need ``--enable-sleep-mode``. They use level 1, which keeps the weights in host memory.

    Args:
        model: name of the served model or of a loaded adapter that is not updated; ``None`` for the default model.
        adapter: name under which updates load the engine's adapter, in place of the model's weights. Servers need ``--enable-lora``,
            ``--max-lora-rank`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. Before the first update, the model answers.

    Raises:
        ValueError: both names are given.
    """

    group = VLLMGroupRoutes()

    def __init__(self, model: str | None = None, *, adapter: str | None = None) -> None:
        if model is not None and adapter is not None:
            raise ValueError(f"VLLM: model = {model!r} and adapter = {adapter!r}: leave one out")
        self._model, self.adapter = model, adapter

    def check(self, sampling: Sampling) -> None:
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise ValueError(
                f"Sampling.temperature = {sampling.temperature}: vLLM draws at {_LOWEST_TEMPERATURE} or above; choose that, or 0"
            )

    async def examine(self, ask: Ask) -> VLLMRoutes:
        offered = await ask(HTTPCall.get("/openapi.json", OpenAPI))
        paths = set(offered.paths) if offered is not None else set()
        # Log-probs of another mode would be wrong without a word.
        if "/server_info" in paths:
            info = await ask(HTTPCall.get("/server_info", VLLMServerInfo, {"config_format": "json"}))
            mode = info.vllm_config.model_config_.logprobs_mode if info is not None else "processed_logprobs"
            if mode != "processed_logprobs":
                raise ValueError(
                    f"the server computes {mode}, which are not of the distribution that it draws from: start it with --logprobs-mode "
                    "processed_logprobs"
                )
        if self.adapter is not None and offered is not None and "/v1/load_lora_adapter" not in paths:
            raise ValueError(
                f"VLLM.adapter = {self.adapter!r}: the server cannot load adapters; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        listed = await ask(HTTPCall.get("/v1/models", VLLMModels)) if "/v1/models" in paths else None
        cards = {card.id: card for card in listed.data} if listed is not None else {}
        if self._model is not None and cards and self._model not in cards:
            raise ValueError(f"VLLM.model = {self._model!r}: the server has {', '.join(cards)}")
        labels = {"/weight_info", "/update_weight_version"} <= paths
        kind = VLLMTokenRoutes if labels and "/inference/v1/generate" in paths else VLLMRoutes
        return kind(self._model, self.adapter, cards, labels=labels)


class VLLMRoutes:
    """Requests of one vLLM server by ``/v1/completions``; see :class:`~areal.inference.http.servers.dialect.Routes`.

    Args:
        model: name in requests; ``None`` for the default model.
        adapter: name under which updates load an adapter.
        cards: models and adapters of the server, by name; empty if unknown.
        labels: it has the routes for labels.
    """

    interrupt = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "abort"})
    pause = interrupt
    resume = HTTPCall("/resume", Empty(), VLLMResumed)
    sleep = HTTPCall("/sleep", Empty(), Anything, {"level": "1"})
    wake = HTTPCall("/wake_up", Empty(), Anything)
    keeps_weights = True
    keeps_requests = False

    def __init__(self, model: str | None, adapter: str | None, cards: dict[str, VLLMCard], *, labels: bool) -> None:
        self._adapter = adapter
        # An adapter answers once it is loaded.
        self._model = adapter if adapter in cards else model
        self.serves = model if model in cards and cards[model].parent is not None else None
        self.max_context = next((card.max_model_len for card in cards.values() if card.parent is None), None)
        self.label = HTTPCall.get("/weight_info", VLLMWeightInfo) if labels else None

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[ReplyBody]:
        body = VLLMCompletion(
            model=self._model,
            prompt=list(prompt),
            **_drawing(sampling, generated, seed),
            request_id=name,
        )
        return HTTPCall("/v1/completions", body, VLLMCompleted)

    def read_reply(self, reply: ReplyBody) -> ReplyPart:
        # Exactly one choice was requested; the schema checks it.
        choice = expect(VLLMCompleted, reply).choices[0]
        if choice.logprobs is None and choice.token_ids:
            raise ValueError("choices[0].logprobs is missing")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
        return ReplyPart(tuple(choice.token_ids), tuple(logprobs), _finish(choice.finish_reason))

    def blames_weights(self, rejection: str) -> bool:
        # Log-probs are NaN, which its JSON cannot have.
        return "Out of range float values" in rejection

    def abort(self, name: str) -> None:
        return None

    def load(self, folder: str, label: str) -> HTTPCall[ReplyBody]:
        if self._adapter is not None:
            body = VLLMLoadAdapter(lora_name=self._adapter, lora_path=folder, load_inplace=True)
            return HTTPCall("/v1/load_lora_adapter", body, Anything)
        reload = VLLMReload(kwargs=VLLMReloadArguments(weights_path=folder))
        return HTTPCall("/collective_rpc", reload, VLLMReloaded)

    def check_loaded(self, reply: ReplyBody) -> None:
        if self._adapter is not None:
            self._model = self._adapter
            return
        # One result per worker.
        if not expect(VLLMReloaded, reply).results:
            raise ValueError("results is empty: no worker loaded anything")

    def read_label(self, reply: ReplyBody) -> str | None:
        return expect(VLLMWeightInfo, reply).weight_version

    def set_label(self, label: str) -> HTTPCall[ReplyBody]:
        return HTTPCall("/update_weight_version", VLLMLabel(new_version=label), Anything)


class VLLMTokenRoutes(VLLMRoutes):
    """Requests of one vLLM server by ``/inference/v1/generate``. A pause freezes them, and its end continues them.

    With an adapter, a pause returns them. A request keeps the adapter with which it began to its end, but its later tokens would have the label
    of the server, which is that of the next adapter.
    """

    def __init__(self, model: str | None, adapter: str | None, cards: dict[str, VLLMCard], *, labels: bool) -> None:
        super().__init__(model, adapter, cards, labels=labels)
        self.keeps_requests = adapter is None
        if self.keeps_requests:
            self.pause = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "keep"})

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[ReplyBody]:
        drawn = VLLMSampling(
            **_drawing(sampling, generated, seed),
        )
        body = VLLMGenerate(request_id=name, model=self._model, token_ids=list(prompt), sampling_params=drawn)
        return HTTPCall("/inference/v1/generate", body, VLLMGenerated)

    def read_reply(self, reply: ReplyBody) -> ReplyPart:
        choice = expect(VLLMGenerated, reply).choices[0]
        drawn = choice.logprobs.content if choice.logprobs is not None else []
        if [each.token_id for each in drawn] != choice.token_ids:
            raise ValueError("choices[0].logprobs.content are not of choices[0].token_ids")
        # Spans that leave out a token, or overlap, give another number of labels.
        labels: list[str] = []
        for span in choice.weight_versions:
            if span.start != len(labels):
                raise ValueError(f"choices[0].weight_versions has no label for token {len(labels)}")
            labels += [span.version] * (span.end - span.start)
        logprobs = tuple(each.logprob if each.logprob > _NOTHING else -math.inf for each in drawn)
        return ReplyPart(tuple(choice.token_ids), logprobs, _finish(choice.finish_reason), tuple(labels))


def _finish(reason: str) -> FinishReason:
    """Return the reason for which a request ended, in this package's words."""
    finish: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
    return finish[reason]


def _drawing(sampling: Sampling, generated: int, seed: int) -> dict[str, Any]:
    """Return the fields of a :class:`VLLMDrawing` for the rest of an answer, of which ``generated`` tokens are there."""
    return {
        "max_tokens": sampling.max_new_tokens - generated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids or ()),
        "ignore_eos": sampling.stop_token_ids is not None,
        # The same seed would repeat the same random numbers.
        "seed": mixed(seed, generated) if generated else seed,
    }
