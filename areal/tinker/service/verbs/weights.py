"""Verbs that save a model, and that load a checkpoint into it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.tinker.backends.errors import UserError
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.store.encryption import encrypt_folder, parse_recipients
from areal.tinker.service.verbs.verb import Capabilities, ModelRequest, RequestTurn


@dataclass(frozen=True)
class SaveWeights(ModelRequest, kind="save_weights"):
    """save_weights. ``path`` is the name of the checkpoint; ``None`` lets the server choose one."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None
    changes_model = False

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        return {"type": "save_weights", "path": await self._save(turn, "training", turn.backend.save)}

    async def _save(self, turn: RequestTurn, kind: str, write: Callable[[str, Path], None]) -> str:
        """Write a named checkpoint of a kind. Returns its path."""
        return await turn.registry.save(
            turn.model,
            kind,
            self.path if self.path is not None else f"seq-{turn.seq:06d}",
            lambda folder: turn.call(write, turn.model.id, folder),
            overwrite=self.overwrite,
            ttl_seconds=self.ttl_seconds,
            user_metadata=self.user_metadata,
            seq_id=turn.seq,
        )


@dataclass(frozen=True)
class SaveForSampler(SaveWeights, kind="save_weights_for_sampler"):
    """save_weights_for_sampler. Without ``path`` the snapshot is ephemeral: it belongs to a new sampling session."""

    sampling_session_seq_id: int | None = None

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        if self.path is None:
            return {"type": "save_weights_for_sampler", "sampling_session_id": await self._save_ephemeral(turn)}
        path = await self._save(turn, "sampler", turn.backend.save_for_sampler)
        return {"type": "save_weights_for_sampler", "path": path}

    async def _save_ephemeral(self, turn: RequestTurn) -> str:
        """Write a snapshot, and create the sampling session that owns it. Returns the id of the session."""
        model, files = turn.model, turn.registry.files
        uid = files.new_id()
        folder = files.ephemeral(model.id, uid)
        await turn.registry.check_room(model.owner)
        files.prepare(folder)
        number = self.sampling_session_seq_id
        try:
            await turn.call(turn.backend.save_for_sampler, model.id, folder)
            size = await asyncio.to_thread(files.size, folder)
            session = await turn.samplers.create(
                model.session_id, number, model.base_model, uid=uid, run_id=model.id, owner=model.owner, size_bytes=size
            )
        except BaseException:
            await asyncio.to_thread(files.remove, folder)
            raise
        # The client's session may have ended meanwhile, with all the sampling sessions that it had then.
        if model.closed is not None:
            await turn.samplers.end(session)
            raise UserError(model.closed)
        return session


@dataclass(frozen=True)
class SaveExternal(SaveWeights, kind="save_weights_external"):
    """save_weights_external: an adapter for download only, under ``tinker://{model_id}/external_weights/{path}``.

    With ``age_encryption_recipients`` (public keys), every file is encrypted to them.
    """

    age_encryption_recipients: Sequence[str] = ()

    def check(self, model: TrainedModel, server: Capabilities) -> list[Any]:
        return parse_recipients(self.age_encryption_recipients)

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        recipients: list[Any] = turn.prepared

        def write(model_id: str, folder: Path) -> None:
            if not recipients:
                turn.backend.save_external(model_id, folder)
                return
            plain = folder.with_name(f"{folder.name}.plain")
            try:
                turn.backend.save_external(model_id, plain)
                encrypt_folder(plain, folder, recipients)
            finally:
                shutil.rmtree(plain, ignore_errors=True)

        return {"type": "save_weights_external", "path": await self._save(turn, "external", write)}


@dataclass(frozen=True)
class LoadWeights(ModelRequest, kind="load_weights"):
    """load_weights into an existing model."""

    path: str = ""
    optimizer: bool = False

    async def run(self, turn: RequestTurn) -> dict[str, Any]:
        return await load_checkpoint(turn, self.path, with_optimizer=self.optimizer)


async def load_checkpoint(turn: RequestTurn, path: str, *, with_optimizer: bool) -> dict[str, Any]:
    """Load a checkpoint into the model of a request, which may be new. Returns the JSON answer."""
    model = turn.model
    _, row, folder = await turn.registry.find(path, "training")
    if row["base_model"] != model.base_model:
        raise UserError(
            f"path is {path!r}, of the base model {row['base_model']!r}: the model has {model.base_model!r}"
        )
    if with_optimizer and row["optimizer"] != model.optimizer:
        raise UserError(f"path is {path!r}, with the state of {row['optimizer']!r}: the model has {model.optimizer!r}")
    await turn.require_backend()
    model.in_backend = True
    model.spec = await turn.call(lambda: turn.backend.load(model.id, folder, with_optimizer=with_optimizer))
    model.pending, model.loaded = False, True
    await turn.store_model()
    return {"type": "load_weights", "path": path, "model_id": model.id}
