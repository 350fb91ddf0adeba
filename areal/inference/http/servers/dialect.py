"""Protocol of a kind of server: the check of a server at the first contact, and its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from areal.inference.http.sent_images import SentImages
from areal.inference.http.servers.group_routes import GroupRoutes
from areal.inference.http.servers.http_call import HTTPCall, LabelReply, LabelSpan, ReplyBody
from areal.inference.protocol import FinishReason, Sampling, TopTokens

R = TypeVar("R", bound=ReplyBody, covariant=True)
S = TypeVar("S", bound=ReplyBody)


@dataclass(frozen=True)
class ReplyPart:
    """Tokens of an answer that one request returned.

    Attributes:
        tokens: token ids.
        logprobs: log-prob of each token, in nats; not finite if the weights are not.
        finish: why the request ended; ``"aborted"`` if a pause interrupted it.
        labels: the server's label of the weights, for each token; ``None`` if its replies have none.
        top: the most likely tokens at each position; empty if they were not requested.
        stop_string: True if the server ended the request at a stop string.
        routed_experts: experts of the tokens of the prompt and of these but the last, ``[tokens, layers, experts per token]``; ``None`` if they
            were not requested.

    Raises:
        ValueError: the lengths differ.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    labels: tuple[str, ...] | None = None
    top: tuple[TopTokens, ...] = ()
    stop_string: bool = False
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens came with {len(self.logprobs)} log-probs")
        if self.labels is not None and len(self.labels) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens came with weight versions of {len(self.labels)}")
        if self.top and len(self.top) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens came with the most likely tokens of {len(self.top)} positions")


def expect(kind: type[S], reply: Any) -> S:
    """Return ``reply``, checked to be of type ``kind``."""
    if not isinstance(reply, kind):
        raise TypeError(f"a {type(reply).__name__} came where a {kind.__name__} was asked for")
    return reply


def labels_of(spans: Sequence[LabelSpan]) -> tuple[str, ...]:
    """Return the label of each token.

    Raises:
        ValueError: the spans leave out a token, or overlap.
    """
    labels: list[str] = []
    for span in spans:
        if span.start != len(labels):
            raise ValueError(f"weight_versions has no label for token {len(labels)}, or several")
        labels += [span.version] * (span.end - span.start)
    return tuple(labels)


class Ask(Protocol):
    """Sends a request to a server. Returns ``None`` if the server does not have the route (status 403, 404 or 405)."""

    def __call__(self, call: HTTPCall[R], /) -> Awaitable[R | None]: ...


@dataclass(frozen=True)
class ServedModel:
    """Description of a server's model by the server.

    Attributes:
        path: directory or hub name from which the server was started; ``None`` if unknown.
        max_context: maximum number of tokens of prompt and answer; ``None`` if unknown.
        adapter: name of a loaded adapter that answers requests, and that updates of the model would not replace; ``None`` for the model.
        checks_weights: the server refuses a directory that has a weight under another name or in another shape, and goes on.
        normalizes: it normalises the pixels of images, and takes images before that.
        quantization: its name of the format to which it rounds weights, ``""`` for none; ``None`` if unknown.
    """

    path: str | None = None
    max_context: int | None = None
    adapter: str | None = None
    checks_weights: bool = True
    normalizes: bool = False
    quantization: str | None = None


@dataclass(frozen=True)
class PauseRoutes:
    """Requests that stop and start generation.

    Attributes:
        pause: stops generation for an update. Running requests return with their tokens so far, unless ``keeps_requests``.
        interrupt: stops generation, and returns running requests with their tokens so far.
        resume: starts generation again.
        keeps_requests: requests go on by themselves after an update, and replies have a label for each token.
    """

    pause: HTTPCall[ReplyBody]
    interrupt: HTTPCall[ReplyBody]
    resume: HTTPCall[ReplyBody]
    keeps_requests: bool = False


@dataclass(frozen=True)
class SleepRoutes:
    """Requests that free the device memory of a paused server.

    Attributes:
        sleep: drops keys and values, and moves the weights to host memory.
        wake: takes the memory back.
        keeps_weights: the weights are the same afterwards; False if only an update brings them back.
    """

    sleep: HTTPCall[ReplyBody]
    wake: HTTPCall[ReplyBody]
    keeps_weights: bool = True


@dataclass(frozen=True)
class LabelRoutes:
    """Requests for the label of a server's weights, which a restart resets.

    Attributes:
        read: returns the label.
        give: returns the request that sets a label.
    """

    read: HTTPCall[LabelReply]
    give: Callable[[str], HTTPCall[ReplyBody]]


class Dialect(Protocol):
    """Kind of server, with the options of the user. An adapter for another kind implements these members and those of :class:`Routes`."""

    @property
    def adapter(self) -> str | None:
        """Name under which updates load an adapter alone; ``None`` if they load the whole model."""

    @property
    def group(self) -> GroupRoutes | None:
        """Requests with which servers receive weights over a process group, new for each caller; ``None`` if they cannot."""

    def check(self, sampling: Sampling) -> None:
        """Raise unless the server's log-probs are those of the distribution from which it samples.

        Raises:
            ValueError: a sampling parameter is not supported.
        """

    async def examine(self, ask: Ask) -> Routes:
        """Return the requests for one server, chosen from what it offers. Called again when the server was restarted.

        Raises:
            ValueError: the server was not started as this class needs it.
        """


class Routes(Protocol):
    """Requests of one server. Those that take images have a method ``generate_with_images`` (see :class:`ImageRoutes`)."""

    @property
    def served(self) -> ServedModel:
        """What the server tells of its model."""

    @property
    def pauses(self) -> PauseRoutes:
        """Requests that stop and start generation."""

    @property
    def labels(self) -> LabelRoutes | None:
        """Requests for the label of the weights; ``None`` if the server has no labels."""

    @property
    def sleeps(self) -> SleepRoutes | None:
        """Requests that free device memory; ``None`` if the server cannot."""

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

    def read_reply(self, reply: ReplyBody, sampling: Sampling) -> ReplyPart:
        """Return the tokens of a reply to :meth:`generate` with these sampling parameters.

        Raises:
            ValueError: a reply of the right form has impossible content.
        """

    def abort(self, name: str) -> HTTPCall[ReplyBody] | None:
        """Return the request that aborts another one; ``None`` if closing its connection does."""

    def load(self, folder: str, label: str) -> Sequence[HTTPCall[ReplyBody]]:
        """Return the requests that load weights from a directory. Those before the last one make room for it, and may fail."""


@runtime_checkable
class ImageRoutes(Protocol):
    """Requests of one server that takes images."""

    def generate_with_images(
        self, name: str, prompt: Sequence[int], generated: int, sampling: Sampling, seed: int, images: SentImages
    ) -> HTTPCall[ReplyBody]:
        """Return the request for the rest of an answer to a prompt with images. Arguments as for :meth:`Routes.generate`.

        Raises:
            ValueError: the server was not started for such images.
        """
