"""What is asked of a server, and what its answers mean: one class for each kind of server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from areal.trainer.rollout.http.schemas import (
    Anything,
    Empty,
    ReplyBody,
    RequestBody,
    SGLangAbort,
    SGLangGenerate,
    SGLangGenerated,
    SGLangPause,
    SGLangSampling,
    SGLangUpdated,
    SGLangUpdateFromDisk,
    VLLMCompleted,
    VLLMCompletion,
    VLLMPaused,
    VLLMReload,
    VLLMReloadArguments,
    VLLMReloaded,
    VLLMResumed,
)
from areal.trainer.rollout.protocol import FinishReason, Sampling
from areal.utils.seeding import mixed

R = TypeVar("R", bound=ReplyBody, covariant=True)


@dataclass(frozen=True)
class HTTPCall(Generic[R]):
    """One POST request: its route, its body, and the type of its reply."""

    route: str
    body: RequestBody
    reply: type[R]
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplyPart:
    """What one request brought of an answer.

    Attributes:
        tokens: ids. logprobs: of each, in nats.
        finish: ``"aborted"`` where the server broke off.
        label: what the server calls the weights that it has, if it says.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    label: str | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens came with {len(self.logprobs)} log-probs")


class Dialect(Protocol):
    """A kind of server.

    ``piece`` and ``check_loaded`` raise ValueError where a reply that has the right form cannot be.
    """

    @property
    def pause(self) -> HTTPCall[ReplyBody]:
        """Take up no request any more, and send back what is under way, with what there is of it."""

    @property
    def resume(self) -> HTTPCall[ReplyBody]: ...

    def check(self, sampling: Sampling) -> None:
        """See that the server's log-probs are those of the distribution that it draws from.

        Raises:
            ValueError: they are not.
        """

    def generate(
        self, name: str, prompt: Sequence[int], made: int, sampling: Sampling, seed: int
    ) -> HTTPCall[ReplyBody]:
        """Ask for what is left of an answer.

        Args:
            name: of the request.
            prompt: what was given and, after it, what was made.
            made: how many of its last tokens were made.
        """

    def piece(self, reply: ReplyBody) -> ReplyPart: ...

    def abort(self, name: str) -> HTTPCall[ReplyBody] | None:
        """End a request; ``None`` where closing its connection does."""

    def load(self, folder: str, version: int) -> HTTPCall[ReplyBody]: ...

    def check_loaded(self, reply: ReplyBody) -> None: ...


class SGLang:
    """Servers of SGLang.

    Its log-probs are those under the temperature, before ``top_p`` and ``top_k``, so those are refused. The server must run without
    ``SGLANG_RETURN_ORIGINAL_LOGPROB``; it keeps to seeds only with ``--enable-deterministic-inference``.

    With stop tokens, the model's own end-of-sequence tokens end a request too: the answer is then gone on with.
    """

    pause = HTTPCall("/pause_generation", SGLangPause(), Anything)
    resume = HTTPCall("/continue_generation", Empty(), Anything)

    def check(self, sampling: Sampling) -> None:
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            raise ValueError(
                f"Sampling.top_p = {sampling.top_p} and top_k = {sampling.top_k}: SGLang's log-probs are those before both, not of the "
                "distribution that it draws from; leave them at 1 and 0"
            )

    def generate(
        self, name: str, prompt: Sequence[int], made: int, sampling: Sampling, seed: int
    ) -> HTTPCall[SGLangGenerated]:
        drawn = SGLangSampling(
            max_new_tokens=sampling.max_new_tokens - made,
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=-1,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=not sampling.stop_token_ids,  # it would switch off stop_token_ids as well
            sampling_seed=seed,  # the server mixes it with the position
        )
        body = SGLangGenerate(rid=name, input_ids=list(prompt), sampling_params=drawn)
        return HTTPCall("/generate", body, SGLangGenerated)

    def piece(self, reply: ReplyBody) -> ReplyPart:
        meta = _as(SGLangGenerated, reply).meta_info
        finish: FinishReason = "aborted" if meta.finish_reason.type == "abort" else meta.finish_reason.type
        entries = meta.output_token_logprobs
        if entries is None and finish != "aborted":
            raise ValueError("meta_info.output_token_logprobs is missing")
        if entries is not None and meta.completion_tokens not in (None, len(entries)):
            raise ValueError(
                f"meta_info.completion_tokens = {meta.completion_tokens}, and output_token_logprobs has {len(entries)} entries"
            )
        return ReplyPart(
            tuple(token for _, token, _ in entries or ()),
            tuple(logprob for logprob, _, _ in entries or ()),
            finish,
            meta.weight_version,
        )

    def abort(self, name: str) -> HTTPCall[ReplyBody]:
        return HTTPCall("/abort_request", SGLangAbort(rid=name), Anything)

    def load(self, folder: str, version: int) -> HTTPCall[SGLangUpdated]:
        body = SGLangUpdateFromDisk(model_path=folder, weight_version=str(version))
        return HTTPCall("/update_weights_from_disk", body, SGLangUpdated)

    def check_loaded(self, reply: ReplyBody) -> None:
        updated = _as(SGLangUpdated, reply)
        if not updated.success:
            raise ValueError(f"success is false: {updated.message}")


class VLLM:
    """Servers of vLLM, started with ``VLLM_SERVER_DEV_MODE=1``, without which they have no routes for weights, and with
    ``--logprobs-mode processed_logprobs``, without which log-probs are those before temperature, ``top_p`` and ``top_k``.

    Replies do not say which weights made them, so that a server that was started anew behind our back goes unnoticed.

    Args:
        model: name of the served model, or of an adapter; ``None`` for the model itself.
    """

    pause = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "abort"})
    resume = HTTPCall("/resume", Empty(), VLLMResumed)

    def __init__(self, model: str | None = None) -> None:
        self._model = model

    def check(self, sampling: Sampling) -> None:
        """Everything can be drawn."""

    def generate(
        self, name: str, prompt: Sequence[int], made: int, sampling: Sampling, seed: int
    ) -> HTTPCall[VLLMCompleted]:
        body = VLLMCompletion(
            model=self._model,
            prompt=list(prompt),
            max_tokens=sampling.max_new_tokens - made,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=mixed(seed, made) if made else seed,  # the same seed would draw with the same numbers again
            request_id=name,
        )
        return HTTPCall("/v1/completions", body, VLLMCompleted)

    def piece(self, reply: ReplyBody) -> ReplyPart:
        choice = _as(VLLMCompleted, reply).choices[0]
        finish: FinishReason = "aborted" if choice.finish_reason == "abort" else choice.finish_reason
        if choice.logprobs is None and choice.token_ids:
            raise ValueError("choices[0].logprobs is missing")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
        return ReplyPart(tuple(choice.token_ids), tuple(logprobs), finish)

    def abort(self, name: str) -> None:
        return None

    def load(self, folder: str, version: int) -> HTTPCall[VLLMReloaded]:
        body = VLLMReload(kwargs=VLLMReloadArguments(weights_path=folder))
        return HTTPCall("/collective_rpc", body, VLLMReloaded)

    def check_loaded(self, reply: ReplyBody) -> None:
        if not _as(VLLMReloaded, reply).results:
            raise ValueError("results is empty: no worker loaded anything")


S = TypeVar("S", bound=ReplyBody)


def _as(kind: type[S], reply: ReplyBody) -> S:
    if not isinstance(reply, kind):
        raise TypeError(f"a {type(reply).__name__} came where a {kind.__name__} was asked for")
    return reply
