"""Encrypted exports: only the recipients can read them, and keys that cannot be used are named."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyrage
import pytest

from areal.tests.unit.tinker.service.fakes import FakeTraining, digest, done, new_model, refused, serving
from areal.tinker.backends.errors import UserError
from areal.tinker.service.store.encryption import parse_recipients
from areal.tinker.service.verbs.weights import SaveExternal


def ssh_keys(folder: Path) -> tuple[str, Any]:
    """Return a new public key of SSH, and its identity."""
    file = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
    return file.with_suffix(".pub").read_text().strip(), pyrage.ssh.Identity.from_buffer(file.read_bytes())


def decrypted(content: bytes, identity: Any) -> bytes | None:
    """Return what an identity can read, or ``None`` if it cannot."""
    try:
        return pyrage.decrypt(content, [identity])
    except pyrage.DecryptError:
        return None


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_every_file_is_encrypted_to_every_recipient(tmp_path: Path) -> None:
    native, stranger = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    public, of_ssh = ssh_keys(tmp_path)

    async def main() -> None:
        async with serving(tmp_path / "root", FakeTraining()) as service:
            model = await new_model(service)
            keys = (str(native.to_public()), public)
            saved = await done(service, SaveExternal(model, 1, digest(1), path="a", age_encryption_recipients=keys))
            assert saved["path"] == f"tinker://{model}/external_weights/a"
            plain = await done(service, SaveExternal(model, 2, digest(2), path="b"))
            folder, other = [await service.checkpoint_folder(each["path"]) for each in (saved, plain)]
            assert [file.name for file in folder.iterdir()] == ["state.json.age"]
            content = (folder / "state.json.age").read_bytes()
            expected = (other / "state.json").read_bytes()
            for identity, readable in ((native, expected), (of_ssh, expected), (stranger, None)):
                assert decrypted(content, identity) == readable
            # Nothing is left without encryption.
            folders = {each.name for each in folder.parent.iterdir() if each.is_dir()}
            assert folders == {folder.name, other.name}

    asyncio.run(main())


PRIVATE = str(pyrage.x25519.Identity.generate())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("age1abc", r"age_encryption_recipients\[1\] is 'age1abc': it must be a native public key of age"),
        ("ssh-ed25519 AAAA", r"age_encryption_recipients\[1\] is 'ssh-ed25519 AAAA': it must be .*SSH public key"),
        ("", r"age_encryption_recipients\[1\] is ''"),
        (PRIVATE, r"age_encryption_recipients\[1\] is a private key: send the public one"),
    ],
    ids=["age", "ssh", "empty", "private"],  # another private key in each process
)
def test_bad_recipient_is_named(key: str, message: str, tmp_path: Path) -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(UserError, match=message) as caught:
        parse_recipients([good, key])
    assert key != PRIVATE or PRIVATE not in str(caught.value)


def test_bad_recipients_fail_their_request_alone(tmp_path: Path) -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())

    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            model = await new_model(service)
            for seq, (keys, message) in enumerate(
                ((("age1abc",), "'age1abc'"), ((good,) * 11, "11 keys: at most 10")), 1
            ):
                request = SaveExternal(model, seq, digest(seq), path="a", age_encryption_recipients=keys)
                assert message in await refused(service, request)
            request = SaveExternal(model, 3, digest(3), path="a", age_encryption_recipients=(good,) * 10)
            await done(service, request)

    asyncio.run(main())


def test_missing_package_is_named_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert parse_recipients([]) == []
    with pytest.raises(UserError, match=r"package pyrage is missing on the server: .* pip install 'areal\[tinker\]'"):
        parse_recipients(["age1abc"])
