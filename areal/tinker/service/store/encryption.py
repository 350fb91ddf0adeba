"""Encryption of exported files in the format of age (https://age-encryption.org)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.tinker.backends.errors import UserError
from areal.utils.new_folder import new_folder

MAX_RECIPIENTS = 10
SUFFIX = ".age"
_FIELD = "age_encryption_recipients"


def parse_recipients(keys: Sequence[str]) -> list[Any]:
    """Return the recipients of an encrypted export.

    Args:
        keys: native public keys of age (``age1…``) or SSH public keys, at most :data:`MAX_RECIPIENTS`.

    Raises:
        UserError: there are too many keys, one cannot be used (named), or the package that encrypts is missing.
    """
    if len(keys) > MAX_RECIPIENTS:
        raise UserError(f"{_FIELD} has {len(keys)} keys: at most {MAX_RECIPIENTS} are supported")
    if not keys:
        return []
    pyrage = _pyrage()
    recipients = []
    for index, key in enumerate(keys):
        # A private key that was given by mistake must not reach logs and databases.
        if key.startswith("AGE-SECRET-KEY") or "PRIVATE KEY" in key:
            raise UserError(f"{_FIELD}[{index}] is a private key: send the public one, and replace this one")
        module = pyrage.x25519 if key.startswith("age1") else pyrage.ssh
        try:
            recipients.append(module.Recipient.from_str(key))
        except pyrage.RecipientError as error:
            raise UserError(
                f"{_FIELD}[{index}] is {key[:100]!r}: it must be a native public key of age (age1…) or an SSH public key "
                f"(ssh-ed25519 or ssh-rsa): {error}"
            ) from error
    return recipients


def encrypt_folder(source: Path, folder: Path, recipients: Sequence[Any]) -> None:
    """Encrypt every file of a folder to a new folder, which appears complete or not at all.

    Args:
        source: folder without subfolders.
        folder: new folder. Each file has the suffix ``.age``.
        recipients: those who can decrypt, from :func:`parse_recipients`.
    """
    pyrage = _pyrage()
    with new_folder(folder) as draft:
        for file in source.iterdir():
            pyrage.encrypt_file(str(file), str(draft / f"{file.name}{SUFFIX}"), list(recipients))


def _pyrage() -> Any:
    """Import the package that encrypts, which only encrypted exports need."""
    try:
        return importlib.import_module("pyrage")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{_FIELD}: the package pyrage is missing on the server: its operator can run pip install 'areal[tinker]'; leave the field out for "
            "an export without encryption"
        ) from error
