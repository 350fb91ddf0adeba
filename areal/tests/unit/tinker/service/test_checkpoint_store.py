"""Checkpoints: names and paths that stay below the root, overwrites, expiry, deletion, listings and orphans."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal.tests.unit.tinker.service.fakes import (
    FakeSampling,
    FakeTraining,
    digest,
    done,
    eventually,
    new_model,
    outcome,
    refused,
    serving,
    step,
    train,
)
from areal.tinker.backends.errors import UserError
from areal.tinker.service.errors import NotFoundError
from areal.tinker.service.store.files import CheckpointFiles, CheckpointPath, check_name, parse_path
from areal.tinker.service.verbs.models import CreateFromCheckpoint, CreateModel, UnloadModel
from areal.tinker.service.verbs.weights import LoadWeights, SaveForSampler, SaveWeights

RUN = "s-1:train:0"
CRAFTED = [
    "..",
    ".",
    "",
    "../x",
    "/etc",
    "a/b",
    "a\\b",
    "%2e%2e",
    "a\x00b",
    "a" * 129,
    "ａ",
    "a\n",
    "-a",
    ".hidden",
    "a@b",
    "tinker://x/weights/y",
    "a b",
    "é",
    None,
    3,
]


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_names_are_refused(name: Any) -> None:
    with pytest.raises(UserError, match="path is"):
        check_name(name)
    whole = (f"tinker://{RUN}/weights/{name}", f"tinker://{name}/weights/x", f"tinker://{RUN}/{name}/x")
    for path in (name, *(whole if isinstance(name, str) else ())):
        with pytest.raises(UserError, match="path is"):
            parse_path(path)


@given(st.text(max_size=40))
@hypothesis_settings(max_examples=200)
def test_a_path_that_parses_is_written_the_same_and_stays_below_the_root(text: str) -> None:
    for path in (text, f"tinker://{RUN}/weights/{text}", f"tinker://{text}/sampler_weights/x"):
        try:
            parsed = parse_path(path)
        except UserError:
            continue
        assert str(parsed) == path
        assert not {"..", "/", "\\", "\x00"} & set(parsed.name)
        assert parsed.name not in (".", "..")


def test_a_link_does_not_lead_out_of_the_root(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "root")
    path = CheckpointPath(RUN, "training", "one")
    inside = files.folder(path, "id")
    assert inside == (tmp_path / "root" / "checkpoints" / RUN / "weights" / "one@id").resolve()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / "checkpoints" / RUN).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leaves the root"):
        files.folder(path, "id")


def test_a_name_is_written_once_unless_overwrite_is_set(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            model = await new_model(service)
            path = (await done(service, SaveWeights(model, 1, digest(1), path="one", user_metadata={"a": "b"})))["path"]
            first = await service.checkpoint_folder(path)
            assert "exists" in await refused(service, SaveWeights(model, 2, digest(2), path="one"))
            # A retry of the save is not a second save.
            again = await service.submit(SaveWeights(model, 1, digest(1), path="one", user_metadata={"a": "b"}))
            assert (await outcome(service, again)).result["path"] == path
            await done(service, train(model, 3))
            await done(service, step(model, 4, learning_rate=1.0))
            assert (await done(service, SaveWeights(model, 5, digest(5), path="one", overwrite=True)))["path"] == path
            second = await service.checkpoint_folder(path)
            assert second != first
            assert not first.exists()
            assert len((await service.checkpoints(model))["checkpoints"]) == 1
            # The name is chosen where the client gives none.
            chosen = (await done(service, SaveWeights(model, 6, digest(6))))["path"]
            assert chosen == f"tinker://{model}/weights/seq-000006"
            # Every wrong name is the fault of one request.
            for seq, name in enumerate(["../x", "", "a/b", "a" * 300], 7):
                assert "path is" in await refused(service, SaveWeights(model, seq, digest(seq), path=name))
            assert "ttl_seconds" in await refused(service, SaveWeights(model, 11, digest(11), path="t", ttl_seconds=0))
        # Nothing but the checkpoints is left in the folder.
        found = sorted(
            p.name.split("@")[0] for p in (tmp_path / "checkpoints" / model / "weights").iterdir() if p.is_dir()
        )
        assert found == ["one", "seq-000006"]

    asyncio.run(main())


def test_a_save_that_fails_leaves_no_folder_and_no_row(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training, FakeSampling()) as service:
            model = await new_model(service)
            for seq, request in enumerate((SaveWeights, SaveForSampler), 1):
                training.fail_next = OSError("disk full")
                assert "disk full" in await refused(service, request(model, seq, digest(seq), path="one"), "server")
            training.fail_next = OSError("disk full")
            await refused(service, SaveForSampler(model, 3, digest(3), sampling_session_seq_id=1), "server")
            assert (await service.checkpoints(model))["checkpoints"] == []
            await done(service, SaveWeights(model, 4, digest(4), path="one"))
        assert [p.name.split("@")[0] for p in (tmp_path / "checkpoints").glob("*/*/*") if p.is_dir()] == ["one"]

    asyncio.run(main())


def test_load_refuses_what_does_not_fit(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            session = await service.create_session([])
            model = await new_model(service, session)
            path = (await done(service, SaveWeights(model, 1, digest(1), path="one")))["path"]
            sampler = (await done(service, SaveForSampler(model, 2, digest(2), path="one")))["path"]
            wrong = {
                sampler: "sampler checkpoint",
                path + "x": "no such checkpoint",
                "one": "path is 'one'",
                "": "path is ''",
            }
            for number, (other, message) in enumerate(wrong.items(), 3):
                assert message in await refused(service, LoadWeights(model, number, digest(number), path=other))
                assert message in await refused(
                    service, CreateFromCheckpoint(session, number, digest(number), path=other)
                )
            other_base = CreateFromCheckpoint(session, 20, digest(20), path=path, base_model="other")
            assert "this server trains base, alias" in await refused(service, other_base)
            created = CreateFromCheckpoint(
                session, 21, digest(21), path=path, base_model="alias", user_metadata={"renderer": "x"}
            )
            assert (await done(service, created))["type"] == "load_weights"
            run = await service.training_run(f"{session}:train:21")
            assert (run["user_metadata"], run["lora_rank"], run["corrupted"]) == ({"renderer": "x"}, 4, False)
            # A creation that failed leaves no model.
            assert set(training.models) == {model, f"{session}:train:21"}

    asyncio.run(main())


def test_a_checkpoint_of_another_base_model_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining(), base_models=("first",)) as service:
            session = await service.create_session([])
            config = {"rank": 2}
            created = CreateModel(session, 0, digest(0), base_model="first", lora_config=config)
            model = (await done(service, created))["model_id"]
            path = (await done(service, SaveWeights(model, 1, digest(1), path="one")))["path"]
        async with serving(tmp_path, FakeTraining(), base_models=("second",)) as service:
            assert "of the base model 'first'" in await refused(
                service, CreateFromCheckpoint(session, 1, digest(2), path=path)
            )

    asyncio.run(main())


def test_listing_publishing_expiry_and_deletion(tmp_path: Path) -> None:
    async def main() -> None:
        training = FakeTraining()
        async with serving(tmp_path, training) as service:
            session = await service.create_session(["a"], {"k": "v"}, display_name="name")
            model = await new_model(service, session, user_metadata={"renderer": "r"})
            for seq, name in enumerate(["a", "b", "c"], 1):
                await done(service, SaveWeights(model, seq, digest(seq), path=name, user_metadata={"n": name}))
            await done(service, SaveForSampler(model, 4, digest(4), path="a"))
            # Runs and sessions.
            run = (await service.training_runs())["training_runs"][0]
            assert (run["training_run_id"], run["base_model"], run["model_owner"]) == (model, "base", "local")
            assert (run["last_checkpoint"]["checkpoint_id"], run["user_metadata"]) == ("weights/c", {"renderer": "r"})
            assert run["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
            assert (await service.session(session))["training_run_ids"] == [model]
            assert (await service.session(session))["user_metadata"] == {"k": "v"}
            assert (await service.sessions())["sessions"] == [session]
            # Checkpoints, by pages.
            page = await service.all_checkpoints(limit=2, offset=1)
            assert [c["checkpoint_id"] for c in page["checkpoints"]] == ["weights/c", "weights/b"]
            assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 4}
            first = (await service.checkpoints(model))["checkpoints"][-1]
            assert (first["user_metadata"], first["public"], first["expires_at"]) == ({"n": "a"}, False, None)
            assert first["size_bytes"] > 0
            # Publish, expire, delete.
            await service.publish(model, "weights/a")
            await service.set_ttl(model, "weights/a", 3600)
            first = (await service.checkpoints(model))["checkpoints"][-1]
            assert first["public"]
            assert first["expires_at"] > first["time"]
            await service.unpublish(model, "weights/a")
            await service.set_ttl(model, "weights/a", None)
            folder = await service.checkpoint_folder_of(model, "weights/b")
            await service.delete_checkpoint(model, "weights/b")
            assert not folder.exists()
            for call in (service.delete_checkpoint, service.publish, service.unpublish, service.checkpoint_folder_of):
                for checkpoint in ("weights/b", "b", "../a", "weights/\x00", "weights/\ud800"):
                    with pytest.raises(NotFoundError):
                        await call(model, checkpoint)
            for wrong in (0, -1, 10**12, True):
                with pytest.raises(UserError, match="ttl_seconds"):
                    await service.set_ttl(model, "weights/a", wrong)
            with pytest.raises(UserError, match="no such checkpoint"):
                await service.weights_info(f"tinker://{model}/weights/b")
            for unknown in ("x", "a:train:9", "\ud800", "../x"):
                for read in (
                    service.training_run,
                    service.checkpoints,
                    service.get_info,
                    service.session,
                    service.sampler,
                ):
                    with pytest.raises(NotFoundError):
                        await read(unknown)
            # The name is free again.
            await done(service, SaveWeights(model, 5, digest(5), path="b"))

    asyncio.run(main())


def test_checkpoints_expire_without_polling(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            model = await new_model(service)
            path = (await done(service, SaveWeights(model, 1, digest(1), path="short", ttl_seconds=1)))["path"]
            await done(service, SaveWeights(model, 2, digest(2), path="long", ttl_seconds=3600))
            folder = await service.checkpoint_folder(path)
            await eventually(lambda: not folder.exists())
            assert [c["checkpoint_id"] for c in (await service.checkpoints(model))["checkpoints"]] == ["weights/long"]
            with pytest.raises(UserError, match="may have been deleted, or have expired"):
                await service.weights_info(path)
            # A short time that is set later counts as well.
            await service.set_ttl(model, "weights/long", 1)
            folder = await service.checkpoint_folder(f"tinker://{model}/weights/long")
        # Expired while no server ran.
        await asyncio.sleep(1.05)
        async with serving(tmp_path, FakeTraining()) as service:
            assert not folder.exists()
            assert (await service.all_checkpoints())["checkpoints"] == []

    asyncio.run(main())


def test_a_start_deletes_interrupted_saves_and_keeps_published_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FakeTraining()) as service:
            model = await new_model(service)
            path = (await done(service, SaveWeights(model, 1, digest(1), path="one")))["path"]
            folder = await service.checkpoint_folder(path)
        parent = folder.parent
        for orphan in (parent / "two@123", parent / "two@123.tmp", parent.parent / "ephemeral" / "456"):
            orphan.mkdir(parents=True)
            (orphan / "file").write_text("x")
        async with serving(tmp_path, FakeTraining()) as service:
            assert await service.checkpoint_folder(path) == folder
            assert folder.is_dir()
            assert [p.name for p in tmp_path.glob("checkpoints/*/*/*") if p.is_dir()] == [folder.name]
        # Another database knows none of the checkpoints: they stay.
        async with serving(tmp_path, FakeTraining(), database_url=f"sqlite:///{tmp_path}/other.db"):
            assert folder.is_dir()

    asyncio.run(main())


def test_the_log_names_what_was_created_saved_refused_and_released(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> str:
        async with serving(tmp_path) as service:
            model = await new_model(service)
            await done(service, SaveWeights(model, 1, digest(1), path="one"))
            await refused(service, SaveWeights(model, 2, digest(2), path="one"))
            await done(service, UnloadModel(model, 3, digest(3)))
            return model

    with caplog.at_level("INFO", "areal.tinker"):
        model = asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records]
    for words in (
        f"{model} was created",
        "/weights/one was saved: ",
        " has failed: the checkpoint ",
        f"{model} has ended",
    ):
        assert sum(words in line for line in lines) == 1, (words, lines)
