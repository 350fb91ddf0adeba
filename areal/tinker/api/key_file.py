"""Users of a server and their keys, from a TOML file, or from a file with one key per line."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from areal.tinker.api.error_replies import field_errors
from areal.tinker.service.tenants.caller import Caller, Quotas

EXAMPLE = '[[users]], name = "ann", key = "tml-…", role = "user"'
_SHA256 = r"^[0-9a-f]{64}$"


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of a key, which is all that the server keeps of it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class User(BaseModel):
    """A user of the server.

    Attributes:
        name: owner of what the user creates.
        key: key, or ``key_sha256`` its SHA-256 as 64 hexadecimal digits.
        role: ``admin`` sees, uses and deletes what belongs to others, too.
        max_stored_mib: quota of checkpoints and snapshots in MiB.
        max_adapters: quota of live models.
        max_queued_tokens: quota of tokens of requests that wait or run.
    """

    # An error must not show a key.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@+-]{1,64}$")]
    key: SecretStr | None = None
    key_sha256: Annotated[str, Field(pattern=_SHA256)] | None = None
    role: Literal["user", "admin"] = "user"
    max_stored_mib: Annotated[int, Field(ge=0)] | None = None
    max_adapters: Annotated[int, Field(ge=0)] | None = None
    max_queued_tokens: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError(f"{self.name} needs one of key and key_sha256")
        # The published SDK refuses any other key before it sends a request.
        text = None if self.key is None else self.key.get_secret_value()
        if text is not None and not (text.startswith("tml-") and len(text) >= 12):
            raise ValueError(f"the key of {self.name} must begin with 'tml-' and have at least 12 characters")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.key_sha256 or "") if self.key is None else key_digest(self.key.get_secret_value())

    @property
    def caller(self) -> Caller:
        """Caller of requests with the key."""
        return Caller(self.name, admin=self.role == "admin")

    @property
    def quotas(self) -> Quotas:
        """Quotas of the user."""
        stored = None if self.max_stored_mib is None else self.max_stored_mib * 2**20
        return Quotas(stored, self.max_adapters, self.max_queued_tokens)


class KeyFile(BaseModel):
    """Content of a key file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    users: Annotated[list[User], Field(min_length=1)]


def read_users(file: Path, owner: str) -> tuple[User, ...]:
    """Return the users of a key file.

    A file of lines that begin with ``tml-`` has a user for each key. A single key is an administrator's.

    Args:
        owner: name of the user of a single key.

    Raises:
        ValueError: the file has no user, or a wrong one.
    """
    text = file.read_text()
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    try:
        if not keys or not all(key.startswith("tml-") for key in keys):
            return tuple(KeyFile.model_validate(tomllib.loads(text)).users)
        if len(keys) == 1:
            return (User(name=owner, key=SecretStr(keys[0]), role="admin"),)
        return tuple(User(name=f"key-{key_digest(key).hex()[:12]}", key=SecretStr(key)) for key in keys)
    except ValidationError as error:
        raise ValueError(f"api_key_file={file}: {field_errors(error.errors())}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"api_key_file={file} is no TOML ({error}): give a table per user ({EXAMPLE}), or one key that begins with tml- per line"
        ) from None


def check_users(users: Sequence[User]) -> None:
    """Refuse two users with one name or one key."""
    for what, values in (("name", [user.name for user in users]), ("key", [user.digest.hex() for user in users])):
        if len(set(values)) < len(values):
            names = sorted(user.name for user, value in zip(users, values, strict=True) if values.count(value) > 1)
            raise ValueError(f"users: {', '.join(names)} have the same {what}: each user needs another one")
