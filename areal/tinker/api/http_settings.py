"""Settings of the HTTP layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.tinker.api.key_file import User, check_users
from areal.tinker.service.settings import ServiceSettings

MIB = 1024 * 1024


@dataclass(frozen=True)
class ApiSettings:
    """Settings of the HTTP layer.

    Attributes:
        users: users whose keys are accepted. With none, every request is accepted and is that of ``owner``, an administrator.
        owner: name of the only caller of a server without users.
        max_body_bytes: largest body of ``forward`` and ``forward_backward``, after decompression.
        max_json_bytes: largest body of any other route.
        hold_s: seconds for which a request for a result waits. The client gives up after 45.
        max_connections: most open connections.
        read_timeout_s: seconds in which the head of a request must arrive, and each further piece of its body.
        link_lifetime_s: seconds for which a download link is valid.
        allowed_hosts: host names under which the server answers, such as ``train.example.org``; download links have them. With none, all.
    """

    users: Sequence[User] = ()
    owner: str = ServiceSettings.owner
    max_body_bytes: int = 128 * MIB
    max_json_bytes: int = 8 * MIB
    hold_s: float = 30.0
    max_connections: int = 8192
    read_timeout_s: float = 30.0
    link_lifetime_s: int = 3600
    allowed_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.hold_s < 45:
            raise ValueError(f"hold_s={self.hold_s} must be above 0 and below 45, after which a client gives up")
        for name in ("max_body_bytes", "max_json_bytes", "max_connections", "read_timeout_s", "link_lifetime_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_users(self.users)
