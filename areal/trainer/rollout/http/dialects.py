"""Routes and formats of the supported servers: one class per kind of server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from areal.trainer.rollout.http.schemas import (
    Anything,
    Empty,
    ReplyBody,
    RequestBody,
    SGLangAbort,
    SGLangGenerate,
    SGLangGenerated,
    SGLangMemory,
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
    """One request: its route, its body, and the type of its reply. The body of a GET request is not sent."""

    route: str
    body: RequestBody
    reply: type[R]
    query: Mapping[str, str] = field(default_factory=dict)
    method: Literal["GET", "POST"] = "POST"


@dataclass(frozen=True)
class ReplyPart:
    """Tokens of an answer that one request returned.

    Attributes:
        tokens: token ids.
        logprobs: log-prob of each token, in nats.
        finish: why the request ended; ``"aborted"`` if a pause interrupted it.
        label: name that the server gives its weights, or ``None``.

    Raises:
        ValueError: the lengths differ.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    label: str | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens came with {len(self.logprobs)} log-probs")


class Dialect(Protocol):
    """Kind of server. An adapter for another server implements these members.

    ``read_reply`` and ``check_loaded`` raise a ``ValueError`` if a reply of the right form has impossible content.
    """

    @property
    def pause(self) -> HTTPCall[ReplyBody]:
        """Request that stops generation and returns running requests with their tokens so far."""

    @property
    def resume(self) -> HTTPCall[ReplyBody]:
        """Request that starts generation again."""

    @property
    def sleep(self) -> HTTPCall[ReplyBody]:
        """Request that frees the device memory of a paused server: it drops keys and values, and moves the weights to host memory."""

    @property
    def wake(self) -> HTTPCall[ReplyBody]:
        """Request that takes the memory back."""

    @property
    def keeps_weights(self) -> bool:
        """True if the weights are the same after :attr:`wake`; False if only an update brings them back."""

    def check(self, sampling: Sampling) -> None:
        """Raise unless the server's log-probs are those of the distribution from which it samples.

        Raises:
            ValueError: a sampling parameter is not supported.
        """

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[ReplyBody]:
        """Return the request for the rest of an answer.

        Args:
            name: id of the request.
            prompt: token ids of the prompt, followed by the tokens generated so far.
            generated: number of tokens generated so far, at the end of ``prompt``.
            sampling: sampling parameters of the answer.
            seed: seed of the answer.
        """

    def read_reply(self, reply: ReplyBody) -> ReplyPart:
        """Return the tokens of a reply to :meth:`generate`."""

    def abort(self, name: str) -> HTTPCall[ReplyBody] | None:
        """Return the request that aborts another one; ``None`` if closing its connection does."""

    def load(self, folder: str, version: int) -> HTTPCall[ReplyBody]:
        """Return the request that loads weights from a directory."""

    def check_loaded(self, reply: ReplyBody) -> None:
        """Raise if a reply to :meth:`load` does not confirm that the weights were loaded."""


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

    pause = HTTPCall("/pause_generation", SGLangPause(), Anything)
    resume = HTTPCall("/continue_generation", Empty(), Anything)
    sleep = HTTPCall("/release_memory_occupation", SGLangMemory(), Anything)
    wake = HTTPCall("/resume_memory_occupation", SGLangMemory(), Anything)

    def __init__(self, *, weights_backup: bool = False) -> None:
        self.keeps_weights = weights_backup

    def check(self, sampling: Sampling) -> None:
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            raise ValueError(
                f"Sampling.top_p = {sampling.top_p} and top_k = {sampling.top_k}: SGLang's log-probs are those before both, not of the "
                "distribution that it draws from; leave them at 1 and 0"
            )

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
        """See :meth:`Dialect.read_reply`."""
        meta = _expect(SGLangGenerated, reply).meta_info
        finish: FinishReason = "aborted" if meta.finish_reason.type == "abort" else meta.finish_reason.type
        # An aborted request may lack the list; any other must have one entry per token.
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
        updated = _expect(SGLangUpdated, reply)
        if not updated.success:
            raise ValueError(f"success is false: {updated.message}")


class VLLM:
    """vLLM servers.

    They must be started with ``VLLM_SERVER_DEV_MODE=1``, which enables the routes for weights, and with ``--logprobs-mode
    processed_logprobs``, which computes log-probs after temperature, ``top_p`` and ``top_k``.

    A restart of a server between two updates is not detected, because replies of ``/v1/completions`` do not name the weights that generated
    them. (Newer releases report a label by ``GET /weight_info`` and, for ``/inference/v1/generate``, one for each token. This client uses
    neither.)

    To sleep, they need ``--enable-sleep-mode``. They use level 1, which keeps the weights in host memory.

    Args:
        model: name of the served model or of an adapter; ``None`` for the default model.
    """

    pause = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "abort"})
    resume = HTTPCall("/resume", Empty(), VLLMResumed)
    sleep = HTTPCall("/sleep", Empty(), Anything, {"level": "1"})
    wake = HTTPCall("/wake_up", Empty(), Anything)
    keeps_weights = True

    def __init__(self, model: str | None = None) -> None:
        self._model = model

    def check(self, sampling: Sampling) -> None:
        """Accept all parameters: log-probs are those of the sampled distribution."""

    def generate(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int
    ) -> HTTPCall[VLLMCompleted]:
        body = VLLMCompletion(
            model=self._model,
            prompt=list(prompt),
            max_tokens=sampling.max_new_tokens - generated,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids or ()),
            ignore_eos=sampling.stop_token_ids is not None,
            seed=mixed(seed, generated) if generated else seed,  # the same seed would repeat the same random numbers
            request_id=name,
        )
        return HTTPCall("/v1/completions", body, VLLMCompleted)

    def read_reply(self, reply: ReplyBody) -> ReplyPart:
        """See :meth:`Dialect.read_reply`."""
        # Exactly one choice was requested; the schema checks it.
        choice = _expect(VLLMCompleted, reply).choices[0]
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
        # One result per worker.
        if not _expect(VLLMReloaded, reply).results:
            raise ValueError("results is empty: no worker loaded anything")


S = TypeVar("S", bound=ReplyBody)


def _expect(kind: type[S], reply: ReplyBody) -> S:
    """Return ``reply``, checked to be of type ``kind``."""
    if not isinstance(reply, kind):
        raise TypeError(f"a {type(reply).__name__} came where a {kind.__name__} was asked for")
    return reply
