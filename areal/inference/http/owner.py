"""Owner of inference servers: the labels by which a server's weights are recognised, and by which two owners of one server are."""

from __future__ import annotations

import os
import secrets
import socket
from typing import ClassVar

_MARK = "areal"


class Owner:
    """Owner of servers, named in the label of their weights: ``areal/HOST/PROCESS/NONCE/VERSION``.

    Args:
        take_over: take servers of an owner that may be alive.
    """

    _living: ClassVar[set[str]] = set()
    """Owners in this process."""

    def __init__(self, *, take_over: bool = False) -> None:
        self._take_over = take_over
        self._nonce = secrets.token_hex(4)
        self._living.add(self._nonce)

    def label(self, version: int) -> str:
        """Return the label of weights of this owner."""
        return f"{_MARK}/{socket.gethostname()}/{os.getpid()}/{self._nonce}/{version}"

    def version_of(self, label: str | None) -> int | None:
        """Return the version in a label, or ``None`` if it is none of this owner."""
        return int(label.rpartition("/")[2]) if label is not None and self._is_own(label) else None

    def other(self, label: str | None) -> str | None:
        """Return host and process of the owner in a label; ``None`` if it has none, or this one."""
        parts = label.split("/") if label is not None else []
        if len(parts) != 5 or parts[0] != _MARK or self._is_own("/".join(parts)):
            return None
        return f"process {parts[2]} of host {parts[1]}"

    def check(self, label: str | None) -> None:
        """Raise if a server with this label belongs to another owner that may be alive.

        Raises:
            ValueError: it does.
        """
        other = self.other(label)
        if other is None or label is None or self._take_over:
            return
        _, host, process, nonce, _ = label.split("/")
        if host == socket.gethostname():
            alive = nonce in self._living if int(process) == os.getpid() else _is_alive(int(process))
            if not alive:
                return
        raise ValueError(
            f"it belongs to another HTTPRollout, in {other}: give each its own servers, or let one rank own all of them (control=). "
            "If that one is gone, pass take_over=True"
        )

    def retire(self) -> None:
        """Leave the servers to others."""
        self._living.discard(self._nonce)

    def _is_own(self, label: str) -> bool:
        return label.split("/")[:4] == self.label(0).split("/")[:4]


def _is_alive(process: int) -> bool:
    """Return whether a process of this host runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
