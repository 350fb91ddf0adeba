"""Listeners at a path: other processes see the socket when it accepts connections."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from areal.weight_sync.connection import Listener


def test_address_appears_when_connections_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appeared: list[bool] = []
    right = socket.socket.listen

    def listen(sock: socket.socket, backlog: int) -> None:
        appeared.append((tmp_path / "name").exists())
        right(sock, backlog)

    monkeypatch.setattr(socket.socket, "listen", listen)
    Listener(str(tmp_path / "name"), 5.0).close()
    assert appeared == [False]
    assert os.listdir(tmp_path) == []
