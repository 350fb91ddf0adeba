"""Protocol of a kind of server: the check of a server at the first contact, and its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from areal.inference.http.servers.base_schemas import ReplyBody
from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.group_routes import GroupRoutes
from areal.inference.protocol import FinishReason, Sampling

R = TypeVar("R", bound=ReplyBody, covariant=True)


@dataclass(frozen=True)
class ReplyPart:
    """Tokens of an answer that one request returned.

    Attributes:
        tokens: token ids.
        logprobs: log-prob of each token, in nats; not finite if the weights are not.
        finish: why the request ended; ``"aborted"`` if a pause interrupted it.
        labels: the server's label of the weights, for each token; ``None`` if its replies have none.

    Raises:
        ValueError: the lengths differ.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens came with {len(self.logprobs)} log-probs")
        if self.labels is not None and len(self.labels) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens came with weight versions of {len(self.labels)}")


class Ask(Protocol):
    """Sends a request to a server. Returns ``None`` if the server does not have the route (status 403, 404 or 405)."""

    def __call__(self, call: HTTPCall[R], /) -> Awaitable[R | None]: ...


class Dialect(Protocol):
    """Kind of server, with the options of the user. An adapter for another kind implements these members."""

    @property
    def adapter(self) -> str | None:
        """Name under which updates load an adapter alone; ``None`` if they load the whole model."""

    @property
    def group(self) -> GroupRoutes:
        """Requests with which the servers receive weights over a process group."""

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
    """Requests of one server.

    ``read_reply`` and ``check_loaded`` raise a ``ValueError`` if a reply of the right form has impossible content.
    """

    @property
    def pause(self) -> HTTPCall[ReplyBody]:
        """Request that stops generation for an update. Running requests return with their tokens so far, unless :attr:`keeps_requests`."""

    @property
    def interrupt(self) -> HTTPCall[ReplyBody]:
        """Request that stops generation, and returns running requests with their tokens so far."""

    @property
    def resume(self) -> HTTPCall[ReplyBody]:
        """Request that starts generation again."""

    @property
    def keeps_requests(self) -> bool:
        """True if requests go on by themselves after an update, and replies have a label for each token."""

    @property
    def sleep(self) -> HTTPCall[ReplyBody]:
        """Request that frees the device memory of a paused server: it drops keys and values, and moves the weights to host memory."""

    @property
    def wake(self) -> HTTPCall[ReplyBody]:
        """Request that takes the memory back."""

    @property
    def keeps_weights(self) -> bool:
        """True if the weights are the same after :attr:`wake`; False if only an update brings them back."""

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of prompt and answer; ``None`` if unknown."""

    @property
    def serves(self) -> str | None:
        """Name of a loaded adapter that answers requests, and that updates of the model would not replace; ``None`` for the model."""

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

    def blames_weights(self, rejection: str) -> bool:
        """Return whether a rejection of :meth:`generate` is due to the weights, not to the request: then no request can succeed."""

    def abort(self, name: str) -> HTTPCall[ReplyBody] | None:
        """Return the request that aborts another one; ``None`` if closing its connection does."""

    def load(self, folder: str, label: str) -> HTTPCall[ReplyBody]:
        """Return the request that loads weights from a directory."""

    def check_loaded(self, reply: ReplyBody) -> None:
        """Raise if a reply to :meth:`load` does not confirm that the weights were loaded."""

    @property
    def label(self) -> HTTPCall[ReplyBody] | None:
        """Request for the label of the weights; ``None`` if the server has no labels."""

    def read_label(self, reply: ReplyBody) -> str | None:
        """Return the label in a reply to :attr:`label`."""

    def set_label(self, label: str) -> HTTPCall[ReplyBody]:
        """Return the request that sets the label. Only called if the server has labels."""
