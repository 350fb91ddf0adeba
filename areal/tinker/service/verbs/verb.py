"""Interface of a verb, and what it may use when it is checked and when it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from areal.tinker.backends.backend import ModelLimits, TrainingBackend
from areal.tinker.backends.errors import UserError
from areal.tinker.service.backend_thread import BackendThread
from areal.tinker.service.checkpoints import CheckpointRegistry
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.sampling import Samplers
from areal.tinker.service.settings import ServiceSettings

_T = TypeVar("_T")

MAX_KIND = 32
"""Most characters of a kind, which is a column of the database."""


@dataclass(frozen=True)
class Capabilities:
    """Values against which requests are checked: those that the backend reports, and the settings of the server."""

    limits: ModelLimits
    losses: Mapping[str, Mapping[str, frozenset[str]]]
    optimizers: frozenset[str]
    settings: ServiceSettings


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestTurn:
    """The turn of one request, in the order of its model.

    Attributes:
        model: model of the request.
        seq: number of the request.
        prepared: return value of :meth:`TrainingRequest.check`.
        backend: training backend. :meth:`call` runs its methods.
        registry: checkpoints.
        samplers: sampling sessions.
        thread: thread of the backend.
        end_turn: lets other models have their turns. A second call does nothing.
        store_state: stores the model with a state.
        release_model: ends the model: requests that wait fail with the reason, and its adapter is released.
    """

    model: TrainedModel
    seq: int
    prepared: Any
    backend: TrainingBackend
    registry: CheckpointRegistry
    samplers: Samplers
    thread: BackendThread
    end_turn: Callable[[], None]
    store_state: Callable[[str], Awaitable[None]]
    release_model: Callable[[str], Awaitable[None]]

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a method of the backend on its thread. A request makes one such call. Then other models have their turns."""
        result = await self.thread.call(function, *args)
        self.end_turn()
        return result

    async def require_backend(self) -> None:
        """Start a backend again that could not be restarted.

        Raises:
            ServerError: it cannot be started.
        """
        await self.thread.need()

    async def store_model(self) -> None:
        """Store the adapter that the model has now."""
        # The model may have closed while the backend created it.
        await self.store_state("live" if self.model.closed is None else "released")


@dataclass(frozen=True)
class TrainingRequest:
    """A request that trains. A subclass is a verb and declares, in its header and its methods, all that the server must know about it:

    .. code-block:: python

        @dataclass(frozen=True)
        class OptimStep(ModelRequest, kind="optim_step"):
            def check(self, model, server): ...
            async def run(self, turn): ...

    A verb with ``batched=True`` has :meth:`run_batch` in place of :meth:`run`.

    Attributes:
        kind: name in the protocol, under which requests are stored and counted.
        batched: whether one call of the backend may run requests of several models.
        changes_model: whether the request changes the adapter, its gradients or its moments. After a restart it runs again.
        uses_gradients: whether the request uses or discards the gradients that wait, also if it fails.
    """

    kind: ClassVar[str] = ""
    batched: ClassVar[bool] = False
    changes_model: ClassVar[bool] = True
    uses_gradients: ClassVar[bool] = False

    def __init_subclass__(cls, *, kind: str = "", batched: bool = False, abstract: bool = False) -> None:
        """Raise a ``TypeError`` if a declaration lacks something."""
        cls.kind, cls.batched = kind, batched
        if abstract:
            return
        place = f"the verb {cls.__name__} in {cls.__module__}"
        if not 0 < len(kind) <= MAX_KIND:
            raise TypeError(f"{place} has the kind {kind!r}: name it in its header, in 1 to {MAX_KIND} characters")
        handler = "run_batch" if batched else "run"
        if getattr(cls, handler) is getattr(TrainingRequest, handler):
            raise TypeError(f"{place} has no method {handler}, which runs it (batched={batched}): define it there")

    def notes(self) -> Any:
        """Return a JSON value that is stored with the request and never read; ``None`` for nothing."""
        return None

    def tokens(self) -> int:
        """Return the number of tokens that count towards the quota of queued tokens."""
        return 0

    def is_small(self) -> bool:
        """Return whether :meth:`check` takes less than a millisecond. Other requests are checked in a thread."""
        return True

    def check(self, model: TrainedModel, server: Capabilities) -> Any:
        """Validate the request. Returns its validated content.

        Raises:
            UserError: the request is wrong. It fails alone, before its turn.
        """
        return None

    def without_content(self) -> Self:
        """Return the request without what :meth:`check` has copied: a queue holds samples once."""
        return self

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        """Execute the request. Returns its JSON answer.

        Raises:
            UserError: the client can mend the request.
            ServerError: it cannot.
        """
        raise NotImplementedError

    @staticmethod
    def run_batch(backend: TrainingBackend, prepared: Sequence[Any]) -> list[Any]:
        """Execute requests of different models in one call, on the thread of the backend.

        Args:
            prepared: return values of :meth:`check`.

        Returns:
            A result or an error for each request.
        """
        raise NotImplementedError

    @staticmethod
    def columns(prepared: Any, result: Any) -> dict[str, Any]:
        """Return the ``loss`` and the ``tokens`` of a result of :meth:`run_batch`. Those with a loss are points of a curve."""
        return {}


@dataclass(frozen=True)
class ModelRequest(TrainingRequest, abstract=True):
    """A request that is executed in the order of ``seq_id`` within its model.

    Attributes:
        model_id: model.
        seq_id: number of the request: 1, 2, 3, … ``None`` in old clients: the next number.
        digest: hash of the body: the same ``(model_id, seq_id)`` with the same digest is a retry.
    """

    model_id: str
    seq_id: int | None
    digest: bytes


@dataclass(frozen=True)
class RefusedRequest(ModelRequest, kind="refused"):
    """A request that the HTTP layer cannot honour. In its turn it fails with the category ``user`` and ``message``.

    Refused at once it would leave a gap in the order of its model, for which later requests would wait.
    """

    message: str = ""
    changes_model = False

    def check(self, model: TrainedModel, server: Capabilities) -> Any:
        raise UserError(self.message)

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        raise UserError(self.message)
