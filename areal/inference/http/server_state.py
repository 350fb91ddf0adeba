"""States of an inference server, as its owner sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ServerWeights:
    """Weights of an update.

    Attributes:
        version: version of the weights.
        folder: absolute path of the directory that has them; ``None`` if there is none.
    """

    version: int
    folder: str | None


@dataclass(frozen=True)
class Serving:
    """The server has weights of a known version, and gets requests."""

    version: int
    why: ClassVar[str] = ""


@dataclass(frozen=True)
class Away:
    """The server could not be reached. It gets no requests until it answers.

    Attributes:
        version: version that it had; ``None`` if it must load weights before its next request.
        why: reason, which names the server; so in the states below.
    """

    version: int | None
    why: str


@dataclass(frozen=True)
class Outdated:
    """The server was started anew. It needs the current weights before its next request."""

    why: str
    version: ClassVar[None] = None


@dataclass(frozen=True)
class Lost:
    """The weights of the server are unknown. It gets no requests until an update succeeds."""

    why: str
    version: ClassVar[None] = None


@dataclass(frozen=True)
class Taken:
    """The server belongs to another owner. It gets no requests and no updates any more."""

    why: str
    version: ClassVar[None] = None


@dataclass(frozen=True)
class Updating:
    """The server is paused by an update, and gets no requests.

    Attributes:
        then: state that it enters at the end of the pause.
    """

    then: Serving | Away | Outdated | Lost | Taken

    @property
    def version(self) -> int | None:
        """Version of its weights now; ``None`` while they are replaced."""
        return self.then.version

    @property
    def why(self) -> str:
        """Reason for which its version is unknown."""
        return self.then.why


ServerState = Serving | Away | Outdated | Lost | Taken | Updating


@dataclass(frozen=True)
class UpdateTimes:
    """Time limits of an update, in seconds: of each step, and for interrupted requests to return."""

    step: float
    drain: float
