"""Weight transports whose senders are on the ranks."""

from __future__ import annotations

from typing import Any

from areal.api import SelectName, TensorSource, WeightUpdateMeta
from areal.dispatch.calls import Calls
from areal.dispatch.executor import Handle
from areal.dispatch.rank_calls import Argument, OnTransport
from areal.dispatch.shared_devices.uses import Use


class GroupTransport:
    """Implements :class:`areal.api.WeightTransport` by the transports of all ranks. The weights do not travel through the driver.

    Args:
        calls: calls of the group.
        key: name of the transports on the ranks.
        make: function that makes the transport of a rank.
        source: the group, the only source that the ranks can send.
    """

    def __init__(self, calls: Calls, key: str, make: Handle, source: TensorSource) -> None:
        self._calls, self._key, self._make, self._source = calls, key, make, source

    def send(self, source: TensorSource, version: int, *, select: SelectName | None = None) -> WeightUpdateMeta:
        """Implement :meth:`areal.api.WeightTransport.send`.

        Raises:
            ValueError: ``source`` is not the group of the transport; and as above.
        """
        if source is not self._source:
            raise ValueError(
                f"source = {source!r}: the transport is on the ranks of one group and sends its weights: pass that group"
            )
        self._calls.require_rank_layouts()
        arguments: dict[str, Any] = {"version": version}
        if select is not None:
            arguments["select"] = Argument(self._calls.executor.ship(select, "select"))
        send = OnTransport(self._calls.name, self._key, self._make, "send", arguments)
        return self._calls.run("send", send, use=Use.SYNC)[0]

    def close(self) -> None:
        """Implement :meth:`areal.api.WeightTransport.close`."""
        if self._calls.started:
            self._calls.run("close", OnTransport(self._calls.name, self._key, self._make, "close"))
