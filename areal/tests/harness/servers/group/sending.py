"""Weights to servers, as a rollout with a carrier sends them, with buffers of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from areal.api.control import Control
from areal.api.weights import WeightUpdateMeta
from areal.inference.http.fleet import Fleet
from areal.inference.http.group.sender import Members
from areal.inference.http.group.transports import AnyCarrier, transport_by
from areal.inference.http.label import Owner
from areal.inference.http.model_check import ModelCheck
from areal.inference.http.server import Server
from areal.inference.http.server_connection import ServerConnection
from areal.inference.http.server_state import UpdateTimes
from areal.inference.http.servers.dialect import Dialect
from areal.utils.distributed import ControlPlane


class GroupSending:
    """Servers that the first rank owns, and the transport to them.

    Args:
        urls: base URLs.
        dialect: kind of server.
        carrier: carrier of the tensors.
        control: control plane over the ranks of the trainer.
        timeout: seconds for each step of an update.
        options: those of :func:`transport_by`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: Dialect,
        carrier: AnyCarrier,
        *,
        control: Control | None = None,
        timeout: float = 10.0,
        **options: Any,
    ) -> None:
        control = control or ControlPlane(alone=True)
        self._owner = Owner(take_over=True)
        here = urls if control.rank == 0 else []
        self.servers = [Server(ServerConnection(url, {}), dialect, self._owner, 0, ModelCheck(None)) for url in here]
        self._fleet = Fleet(self.servers, UpdateTimes(timeout, 1.0), "test-servers")
        members = Members(self._fleet, self._owner) if here else None
        assert dialect.group is not None
        options = {"packed_bytes": None, "cast": None, "timeout": timeout, **options}
        self._transport = transport_by(carrier, control, members, dialect.group, **options)
        self._fleet.submit(self._fleet.open()).result()

    def send(self, source: Any, version: int, **options: Any) -> WeightUpdateMeta:
        return self._transport.send(source, version, **options)

    @property
    def faults(self) -> dict[str, str]:
        """Reason by URL of the servers whose weights are not known."""
        return {server.url: server.why for server in self.servers if server.version is None}

    def close(self) -> None:
        self._transport.close()
        self._fleet.submit(self._fleet.close()).result()
        self._owner.retire()
        self._fleet.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def version_in(label: str) -> str:
    """Return the version at the end of a label of a server's weights."""
    return label.rpartition("/")[2]
