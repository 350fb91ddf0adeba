"""vLLM servers: the check at the first contact, and requests with text routes or, where offered, with token routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from areal.inference.http.sent_images import SentImages
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
from areal.inference.http.servers.http_call import (
    Anything,
    Empty,
    HTTPCall,
    LabelReply,
    ModelList,
    OpenAPI,
    ReplyBody,
    SetLabel,
)
from areal.inference.http.servers.routed_experts import of_npy
from areal.inference.http.servers.vllm_group import VLLMGroupRoutes
from areal.inference.http.servers.vllm_images import VLLMFeatures, features_of
from areal.inference.http.servers.vllm_schemas import (
    VLLMChoiceBase,
    VLLMCompleted,
    VLLMCompletion,
    VLLMGenerate,
    VLLMGenerated,
    VLLMGeneratedTop,
    VLLMLoadAdapter,
    VLLMPaused,
    VLLMPosition,
    VLLMReload,
    VLLMReloadArguments,
    VLLMReloaded,
    VLLMResumed,
    VLLMSampling,
    VLLMServerInfo,
    VLLMTokenLogProb,
    VLLMTokensChoice,
    VLLMUnloadAdapter,
)
from areal.inference.protocol import FinishReason, Sampling, TopTokens
from areal.utils.seeding import mixed

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, unless it is 0."""

_FORMATS: dict[str | None, str] = {"fp8": "fp8_per_tensor"}
"""What vLLM makes of 16-bit weights by a name that is also one of files."""

_NOTHING = -9999.0
"""Log-prob in vLLM's JSON of what is not finite."""

_ID_PREFIX = "token_id:"
"""Prefix of a token's id where vLLM names tokens by text."""


def _set_label(label: str) -> HTTPCall[Anything]:
    """Return the request that sets a label. A function, because client processes get routes as pickles."""
    return HTTPCall("/update_weight_version", SetLabel(new_version=label), Anything)


_LABELS = LabelRoutes(HTTPCall.get("/weight_info", LabelReply), _set_label)
_ABORT = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "abort"})
_KEEP = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "keep"})
_RESUME = HTTPCall("/resume", Empty(), VLLMResumed)


class VLLM:
    """vLLM servers.

    They must be started with ``VLLM_SERVER_DEV_MODE=1``, which enables the routes for weights, and with ``--logprobs-mode
    processed_logprobs``, which computes log-probs after temperature, ``top_p`` and ``top_k``. A server that reports another mode is refused.

    With ``--enable-scale-out``, requests go to ``/inference/v1/generate`` and run on across updates of the model: nothing is sent twice, and
    the server names the weights of each token. Otherwise they go to ``/v1/completions``, and an update interrupts them, as one of an adapter
    does in any case. Prompts with images need the former, and ``--no-mm-device-do-normalize``.

    With ``Sampling.stop_token_ids=None``, answers also end at the end-of-sequence token of the server's tokenizer.

    To sleep, they need ``--enable-sleep-mode``. They use level 1, which keeps the weights in host memory.

    Args:
        model: name of the served model or of a loaded adapter that is not updated; ``None`` for the default model.
        adapter: name under which updates load the engine's adapter, in place of the model's weights. Servers need ``--enable-lora``,
            ``--max-lora-rank`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. Before the first update, the model answers.
        routed_experts: answers have the experts of each token, for training to replay. Servers need ``--enable-return-routed-experts``.

    Raises:
        ValueError: both names are given.
    """

    group = VLLMGroupRoutes()

    def __init__(self, model: str | None = None, *, adapter: str | None = None, routed_experts: bool = False) -> None:
        if model is not None and adapter is not None:
            raise ValueError(f"VLLM: model = {model!r} and adapter = {adapter!r}: leave one out")
        self._model, self.adapter, self._routed_experts = model, adapter, routed_experts

    def check(self, sampling: Sampling) -> None:
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise ValueError(
                f"Sampling.temperature = {sampling.temperature}: vLLM draws at {_LOWEST_TEMPERATURE} or above; choose that, or 0"
            )

    async def examine(self, ask: Ask) -> VLLMRoutes:
        offered = await ask(HTTPCall.get("/openapi.json", OpenAPI))
        paths = set(offered.paths) if offered is not None else set()
        # Log-probs of another mode would be wrong without a word.
        config = None
        if "/server_info" in paths:
            info = await ask(HTTPCall.get("/server_info", VLLMServerInfo, {"config_format": "json"}))
            config = None if info is None else info.vllm_config.model_config_
            if self._routed_experts and config is not None and config.enable_return_routed_experts is False:
                raise ValueError(
                    "VLLM.routed_experts = True: the server returns none; start it with --enable-return-routed-experts"
                )
            if config is not None and config.logprobs_mode != "processed_logprobs":
                raise ValueError(
                    f"the server computes {config.logprobs_mode}, which are not of the distribution that it draws from: start it with "
                    "--logprobs-mode processed_logprobs"
                )
        if self.adapter is not None and offered is not None and "/v1/load_lora_adapter" not in paths:
            raise ValueError(
                f"VLLM.adapter = {self.adapter!r}: the server cannot load adapters; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        listed = await ask(HTTPCall.get("/v1/models", ModelList)) if "/v1/models" in paths else None
        cards = {card.id: card for card in listed.data} if listed is not None else {}
        if self._model is not None and cards and self._model not in cards:
            raise ValueError(f"VLLM.model = {self._model!r}: the server has {', '.join(cards)}")
        chosen = cards.get(self._model or "")
        base = next((card for card in cards.values() if card.parent is None), None)
        multimodal = None if config is None else config.multimodal_config
        served = ServedModel(
            path=None if base is None else base.root,
            max_context=None if base is None else base.max_model_len,
            adapter=None if chosen is None or chosen.parent is None else chosen.id,
            normalizes=multimodal is not None and multimodal.mm_device_do_normalize,
            quantization=None if config is None else _FORMATS.get(config.quantization, config.quantization) or "",
        )
        labels = {"/weight_info", "/update_weight_version"} <= paths
        kind = VLLMTokenRoutes if labels and "/inference/v1/generate" in paths else VLLMRoutes
        return kind(self._model, self.adapter, served, labels=labels, routed_experts=self._routed_experts)


class VLLMRoutes:
    """Requests of one vLLM server by ``/v1/completions``; see :class:`~areal.inference.http.servers.dialect.Routes`.

    Args:
        model: name in requests; ``None`` for the default model.
        adapter: name under which updates load an adapter.
        served: what the server tells of its model.
        labels: it has the routes for labels.
        routed_experts: replies must have the experts of each token.
    """

    pauses = PauseRoutes(_ABORT, _ABORT, _RESUME)
    sleeps: SleepRoutes | None = SleepRoutes(
        HTTPCall("/sleep", Empty(), Anything, {"level": "1"}), HTTPCall("/wake_up", Empty(), Anything)
    )

    def __init__(
        self,
        model: str | None,
        adapter: str | None,
        served: ServedModel,
        *,
        labels: bool,
        routed_experts: bool = False,
    ) -> None:
        self._model, self._adapter, self.served = model, adapter, served
        self._routed_experts = routed_experts
        self.labels = _LABELS if labels else None

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[ReplyBody]:
        body = VLLMCompletion(
            model=self._model,
            prompt=list(prompt),
            **_drawing(sampling, generated, seed),
            logprobs=sampling.top_logprobs,
            return_tokens_as_token_ids=True if sampling.top_logprobs else None,
            request_id=name,
        )
        return HTTPCall("/v1/completions", body, VLLMCompleted)

    def read_reply(self, reply: ReplyBody, sampling: Sampling) -> ReplyPart:
        # Exactly one choice was requested; the schema checks it.
        choice = expect(VLLMCompleted, reply).choices[0]
        if choice.logprobs is None and choice.token_ids:
            raise ValueError("choices[0].logprobs is missing")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
        top: tuple[TopTokens, ...] = ()
        if sampling.top_logprobs and choice.logprobs is not None:
            rows = [
                {int(key.removeprefix(_ID_PREFIX)): value for key, value in row.items()}
                for row in choice.logprobs.top_logprobs or ()
            ]
            top = tuple(_most_likely(row, sampling.top_logprobs) for row in rows)
        return self._part(choice, tuple(logprobs), top=top)

    def _part(
        self,
        choice: VLLMChoiceBase,
        logprobs: tuple[float, ...],
        labels: tuple[str, ...] | None = None,
        top: tuple[TopTokens, ...] = (),
    ) -> ReplyPart:
        """Return the tokens of a reply."""
        # Reasons in this package's words.
        finish: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
        stop_string = isinstance(choice.stop_reason, str)
        experts = None
        if self._routed_experts and choice.token_ids:
            experts = of_npy(choice.routed_experts, "choices[0].routed_experts")
        return ReplyPart(
            tuple(choice.token_ids), logprobs, finish[choice.finish_reason], labels, top, stop_string, experts
        )

    def abort(self, name: str) -> None:
        return None

    def load(self, folder: str, label: str) -> Sequence[HTTPCall[ReplyBody]]:
        if self._adapter is None:
            reload = VLLMReload(kwargs=VLLMReloadArguments(weights_path=folder))
            return (HTTPCall("/collective_rpc", reload, VLLMReloaded),)
        # A server whose load fails gets no requests.
        self._model = self._adapter
        # With ``load_inplace``, workers would read the folder at each step.
        return (
            HTTPCall("/v1/unload_lora_adapter", VLLMUnloadAdapter(lora_name=self._adapter), Anything),
            HTTPCall("/v1/load_lora_adapter", VLLMLoadAdapter(lora_name=self._adapter, lora_path=folder), Anything),
        )


class VLLMTokenRoutes(VLLMRoutes):
    """Requests of one vLLM server by ``/inference/v1/generate``. A pause freezes them, and its end continues them.

    With an adapter, a pause returns them. A request keeps the adapter with which it began to its end, but its later tokens would have the label
    of the server, which is that of the next adapter.
    """

    def __init__(self, model: str | None, adapter: str | None, served: ServedModel, **options: bool) -> None:
        super().__init__(model, adapter, served, **options)
        if adapter is None:
            self.pauses = PauseRoutes(_KEEP, _ABORT, _RESUME, keeps_requests=True)

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[ReplyBody]:
        return self._request(name, prompt, _drawing(sampling, generated, seed), sampling)

    def generate_with_images(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int, images: SentImages
    ) -> HTTPCall[ReplyBody]:
        if self.served.normalizes:
            raise ValueError(
                "the prompt has images, and this server would normalise them a second time: start vLLM with --no-mm-device-do-normalize"
            )
        return self._request(name, prompt, _drawing(sampling, generated, seed), sampling, features_of(images))

    def _request(
        self,
        name: str,
        prompt: Sequence[int],
        drawing: dict[str, Any],
        sampling: Sampling,
        features: VLLMFeatures | None = None,
    ) -> HTTPCall[ReplyBody]:
        # Stop strings need the text. The first of the most likely tokens is the sampled one, so that one more is needed.
        top = sampling.top_logprobs + 1 if sampling.top_logprobs else 0
        drawn = VLLMSampling(**drawing, logprobs=top, detokenize=bool(sampling.stop))
        body = VLLMGenerate(
            request_id=name, model=self._model, token_ids=list(prompt), sampling_params=drawn, features=features
        )
        return HTTPCall("/inference/v1/generate", body, VLLMGeneratedTop if top else VLLMGenerated)

    def read_reply(self, reply: ReplyBody, sampling: Sampling) -> ReplyPart:
        if not sampling.top_logprobs:
            return self._read(expect(VLLMGenerated, reply).choices[0], ())
        choice = expect(VLLMGeneratedTop, reply).choices[0]
        content = choice.logprobs.content if choice.logprobs is not None else []
        rows = [{entry["token_id"]: entry["logprob"] for entry in each["top_logprobs"]} for each in content]
        return self._read(choice, tuple(_most_likely(row, sampling.top_logprobs) for row in rows))

    def _read(
        self, choice: VLLMTokensChoice[VLLMTokenLogProb] | VLLMTokensChoice[VLLMPosition], top: tuple[TopTokens, ...]
    ) -> ReplyPart:
        """Return the tokens of a reply with their log-probs and labels."""
        drawn: Sequence[VLLMTokenLogProb] = choice.logprobs.content if choice.logprobs is not None else []
        if [each["token_id"] for each in drawn] != choice.token_ids:
            raise ValueError("choices[0].logprobs.content are not of choices[0].token_ids")
        logprobs = tuple([each["logprob"] if each["logprob"] > _NOTHING else -math.inf for each in drawn])
        return self._part(choice, logprobs, labels_of(choice.weight_versions), top)


def _most_likely(row: Mapping[int, float], count: int) -> TopTokens:
    """Return the ``count`` most likely tokens of one position. A row has one more: the sampled token."""
    ordered = sorted((entry for entry in row.items() if entry[1] > _NOTHING), key=lambda entry: -entry[1])[:count]
    return TopTokens(tuple(token for token, _ in ordered), tuple(value for _, value in ordered))


def _drawing(sampling: Sampling, generated: int, seed: int) -> dict[str, Any]:
    """Return the fields of a :class:`VLLMDrawing` for the rest of an answer, of which ``generated`` tokens are there."""
    return {
        "max_tokens": sampling.max_new_tokens - generated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids or ()),
        "ignore_eos": sampling.stop_token_ids is not None,
        # The same seed would repeat the same random numbers.
        "seed": mixed(seed, generated) if generated else seed,
    }
