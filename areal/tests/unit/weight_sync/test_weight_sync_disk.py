"""Weight versions on disk: complete or absent, even if a writer is killed or files are removed or replaced."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api import NamedTensor
from areal.engine.checkpoint import atomic_dir
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.tests.dist.checkpoint.stages import at_stages
from areal.tests.grid.models import model_dir
from areal.tests.harness.processes import needs_own_world
from areal.tests.unit.weight_sync.updates import FILE_BYTES, ended, filled, number, start
from areal.utils.distributed import ControlPlane, init_default_group
from areal.weight_sync import DirectTransport, DiskReceiver, DiskTransport, ModuleSource
from areal.weight_sync.disk import published

pytestmark = needs_own_world


def publish_and_be_killed(folder: Path, stage: str) -> None:
    torch.set_num_threads(1)
    init_default_group()
    transport = DiskTransport(ControlPlane(), folder, keep=1, file_bytes=FILE_BYTES * 4)
    transport.send(ModuleSource(filled(1)), 1)

    def die(reached: str) -> None:
        if reached == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_stages(die):
        transport.send(ModuleSource(filled(2)), 2)


@pytest.mark.parametrize("stage", ["draft opened", "in file 1", "in file 3", "written", "published", "pruned"])
def test_killed_writer_leaves_newest_complete_version(stage: str, tmp_path: Path, control: ControlPlane) -> None:
    folder = tmp_path / "weights"
    assert ended(start(publish_and_be_killed, folder, stage)) == -signal.SIGKILL
    module, expected = filled(0), 2 if stage in ("published", "pruned") else 1
    receiver = DiskReceiver(folder, module)
    assert receiver.receive(0) == expected
    assert (number(module), receiver.version) == (expected, expected)
    assert not receiver.pending()
    with pytest.raises(TimeoutError, match="no new version"):
        receiver.receive(0)
    DiskTransport(control, folder, keep=1).send(ModuleSource(filled(3)), 3)
    assert os.listdir(folder) == ["version-00000003"]
    assert receiver.receive(0) == number(module) == 3


def test_disk_keeps_newest_and_skips_missed_versions(tmp_path: Path, control: ControlPlane) -> None:
    module = filled(0)
    transport, receiver = DiskTransport(control, tmp_path / "w", keep=2), DiskReceiver(tmp_path / "w", module)
    for version in range(1, 5):
        transport.send(ModuleSource(filled(version)), version)
    assert [manifest.about["version"] for _, manifest in published(tmp_path / "w")] == [3, 4]
    assert receiver.receive(0) == number(module) == 4
    transport.send(ModuleSource(filled(2)), 2)  # a trainer that resumed from an older checkpoint
    assert receiver.pending()
    assert receiver.receive(0) == number(module) == 2


def test_partial_updates_are_applied_after_newest_full_version(tmp_path: Path, control: ControlPlane) -> None:
    module = filled(0)
    transport, receiver = DiskTransport(control, tmp_path / "w", keep=4), DiskReceiver(tmp_path / "w", module)
    transport.send(ModuleSource(filled(1)), 1)
    for version, layer in ((2, "q_proj"), (3, "k_proj")):
        meta = transport.send(ModuleSource(filled(version)), version, select=lambda name, layer=layer: layer in name)
        assert (meta.kind, meta.n_tensors) == ("selected", 2)
    assert receiver.receive(0) == 3
    result = {name: float(value.unique()) for name, value in module.named_parameters()}
    assert result == {name: 2 if "q_proj" in name else 3 if "k_proj" in name else 1 for name in result}


def test_failed_publication_leaves_no_draft(
    tmp_path: Path, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the manifest is written: all weights are there already."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module, folder = filled(0), tmp_path / "w"
    transport, receiver = DiskTransport(control, folder), DiskReceiver(folder, module)
    transport.send(ModuleSource(filled(1)), 1)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_dir.json, "dump", full)
        with pytest.raises(RuntimeError, match=r"No space left.*receivers use version 2 if it is in the folder"):
            transport.send(ModuleSource(filled(2)), 2)
    assert os.listdir(folder) == ["version-00000001"]
    assert receiver.receive(0) == number(module) == 1
    transport.send(ModuleSource(filled(3)), 3)
    assert receiver.receive(0) == number(module) == 3


@pytest.mark.parametrize("received_before", [False, True])
def test_versions_stay_until_later_ones_have_all_of_their_tensors(
    received_before: bool, tmp_path: Path, control: ControlPlane
) -> None:
    module = filled(0)
    transport, receiver = DiskTransport(control, tmp_path / "w", keep=1), DiskReceiver(tmp_path / "w", module)

    def versions() -> list[int]:
        return [manifest.about["version"] for _, manifest in published(tmp_path / "w")]

    transport.send(ModuleSource(filled(1)), 1)
    if received_before:
        assert receiver.receive(0) == 1
    for version, layer, kept in ((2, "q_proj", [1, 2]), (3, "k_proj", [1, 2, 3]), (4, "q_proj", [1, 3, 4])):
        transport.send(ModuleSource(filled(version)), version, select=lambda name, layer=layer: layer in name)
        assert versions() == kept
    assert receiver.receive(0) == 4
    result = {name: float(value.unique()) for name, value in module.named_parameters()}
    assert result == {name: 4 if "q_proj" in name else 3 if "k_proj" in name else 1 for name in result}
    transport.send(ModuleSource(filled(5)), 5)
    assert versions() == [5]


def test_version_is_a_model_directory(tmp_path: Path, control: ControlPlane) -> None:
    DiskTransport(control, tmp_path / "w", cast=torch.bfloat16, model=model_dir("qwen3")).send(
        ModuleSource(filled(1)), 7
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "w" / "version-00000007")
    assert plain.dtype == torch.bfloat16
    assert number(plain) == 1


def test_damaged_version_raises_and_changes_no_weight(tmp_path: Path, control: ControlPlane) -> None:
    module = filled(0)
    DiskTransport(control, tmp_path / "w").send(ModuleSource(filled(1)), 1)
    file = next((tmp_path / "w" / "version-00000001").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    receiver = DiskReceiver(tmp_path / "w", module)
    with pytest.raises(ValueError, match=r"model-00001\.safetensors is damaged: its checksum"):
        receiver.receive(0)
    assert (number(module), receiver.version) == (0, None)


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_version_removed_while_opening_is_not_mixed(
    what: str, tmp_path: Path, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove a version after some of its files have been opened."""
    module = filled(0)
    transport = DiskTransport(control, tmp_path / "w", keep=1, file_bytes=FILE_BYTES)
    transport.send(ModuleSource(filled(1)), 1)
    shape, asked = TensorFiles.shape, list[str]()

    def then_gone(files: TensorFiles, key: str) -> tuple[int, ...]:
        asked.append(key)
        if len(asked) == 5:
            transport.send(ModuleSource(filled(2)), 1 if what == "replaced" else 2)
        return shape(files, key)

    monkeypatch.setattr(TensorFiles, "shape", then_gone)
    receiver = DiskReceiver(tmp_path / "w", module)
    assert receiver.receive(0) == (1 if what == "replaced" else 2)
    assert number(module) == 2


@pytest.mark.parametrize(("options", "message"), [({"keep": 0}, "keep = 0"), ({"file_bytes": 0}, "file_bytes = 0")])
def test_invalid_disk_transport_options_raise(
    options: dict[str, int], message: str, tmp_path: Path, control: ControlPlane
) -> None:
    with pytest.raises(ValueError, match=message):
        DiskTransport(control, tmp_path, **options)  # type: ignore[arg-type]


class Breaking:
    """Source that raises during iteration."""

    def named_tensors(self) -> Iterator[NamedTensor]:
        for i, named in enumerate(ModuleSource(filled(9)).named_tensors()):
            if i == 5:
                raise RuntimeError("the engine broke")
            yield named


@pytest.mark.parametrize("way", ["disk", "direct"])
def test_failing_source_leaves_old_version(way: str, tmp_path: Path, control: ControlPlane) -> None:
    module = filled(0)
    receiver = DiskReceiver(tmp_path / "w", module) if way == "disk" else None
    transport = (
        DirectTransport(control, module)
        if receiver is None
        else DiskTransport(control, tmp_path / "w", file_bytes=FILE_BYTES)
    )
    for version in (1, 2, 3):
        if version == 2:
            with pytest.raises(RuntimeError, match=r"the engine broke.*version 2 was not sent"):
                transport.send(Breaking(), 2)
            assert receiver is None or not receiver.pending()
            assert number(module) == 1
            continue
        transport.send(ModuleSource(filled(version)), version)
        assert receiver is None or receiver.receive(0) == version
        assert number(module) == version
    transport.close()
