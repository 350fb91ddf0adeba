"""Live models of an earlier process, with the requests that it has not finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select, update

from areal.tinker.backends.prepared import decode_request
from areal.tinker.service.checkpoints import spec_of
from areal.tinker.service.order import Entry, LiveModel
from areal.tinker.service.requests import RawChunk, RawDatum, RawTensor
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.futures import forget_begun
from areal.tinker.service.store.tables import futures, journal, models, sessions
from areal.tinker.service.verbs.verb import TrainingRequest

MAX_ATTEMPTS = 4
"""Ends of the server, or losses of the backend, after which a request that they have interrupted counts as their cause."""


@dataclass
class Survivor:
    """A model that goes on. ``entries`` have no result yet; those before the model's ``next_seq`` have run."""

    model: LiveModel
    entries: list[Entry] = field(default_factory=list)


async def find_survivors(database: Database, recovers: bool) -> tuple[list[Survivor], dict[str, str]]:
    """Return the models of live sessions that can be restored, and count the ends of servers that have interrupted their requests.

    Args:
        recovers: whether models are restored at all.

    Returns:
        The models, and by the ids of other models of live sessions why these are lost.
    """
    return await database.write(_survivors) if recovers else ([], {})


def _survivors(connection: Connection) -> tuple[list[Survivor], dict[str, str]]:
    # Requests that a snapshot contains have run.
    contained = select(models.c.id).where(models.c.id == futures.c.model_id, models.c.snapshot_seq >= futures.c.seq_id)
    done = {"state": "failed", "category": "server", "error": "the request has run, but its result could not be stored"}
    connection.execute(update(futures).where(futures.c.state == "pending", contained.exists()).values(**done))
    alive = models.c.state.in_(("creating", "live")) & (sessions.c.state == "live")
    chosen = select(models, sessions.c.owner).join(sessions, sessions.c.id == models.c.session_id).where(alive)
    survivors: list[Survivor] = []
    reasons: dict[str, str] = {}
    for row in connection.execute(chosen).mappings().all():
        try:
            survivors.append(_survivor(connection, row))
        except (LookupError, ValueError) as error:
            reasons[row["id"]] = f"the server was restarted, and {error}"
    # No request has begun in this server.
    forget_begun(connection)
    return survivors, reasons


def _survivor(connection: Connection, row: Any) -> Survivor:
    """Return a model.

    Raises:
        LookupError: it cannot be restored. Says why.
    """
    stored = -1 if row["snapshot_seq"] is None else row["snapshot_seq"]
    columns = (futures.c.request_id, futures.c.seq_id, futures.c.kind, futures.c.state, journal.c.attempts)
    joined = select(*columns).outerjoin(journal, journal.c.request_id == futures.c.request_id)
    joined = joined.where(futures.c.model_id == row["id"], futures.c.seq_id > stored).order_by(futures.c.seq_id)
    rows = connection.execute(joined).all()
    model = _model(row)
    # A pending request before a finished one has run: its result could not be stored.
    states = {each.seq_id: each.state for each in rows}
    last_done = max((seq for seq, state in states.items() if state in ("done", "pruned")), default=stored)
    model.next_seq = last_done + 1
    while states.get(model.next_seq) == "failed":
        model.next_seq += 1
    model.failed = {seq for seq, state in states.items() if state == "failed" and seq > model.next_seq}
    model.top_seq = max(states, default=max(stored, 0))
    model.asleep = model.next_seq > 0
    survivor = Survivor(model)
    for each in rows:
        if each.state != "pending":
            continue
        name = f"its request with seq_id {each.seq_id} ({each.kind})"
        if each.attempts is None:
            raise LookupError(f"the content of {name} is not stored")
        # A request that had not begun is not the cause of the end.
        interrupted = each.seq_id == model.next_seq == row["begun_seq"]
        attempts = each.attempts + interrupted
        if attempts >= MAX_ATTEMPTS:
            raise LookupError(f"{name} had begun when {MAX_ATTEMPTS} servers ended: it may be the cause")
        mine = journal.c.request_id == each.request_id
        content = connection.execute(select(journal.c.content).where(mine)).scalar_one()
        entry = decode_entry(each.request_id, each.seq_id, bytes(content))
        entry.attempts = attempts
        survivor.entries.append(entry)
        if interrupted:
            connection.execute(update(journal).where(mine).values(attempts=attempts))
    if row["snapshot_uid"] is None and not any(each.seq_id == 0 and each.attempts is not None for each in rows):
        raise LookupError("neither a snapshot nor the creation of the model is stored")
    return survivor


def _model(row: Any) -> LiveModel:
    model = LiveModel(row["id"], row["session_id"], row["owner"], row["base_model"], row["optimizer"])
    model.created, model.last_request = row["created"], row["last_request"]
    model.user_metadata, model.stored_uid = row["user_metadata"], row["snapshot_uid"]
    model.spec = None if row["rank"] is None else spec_of(row)
    return model


def decode_entry(request_id: str, seq: int, content: bytes) -> Entry:
    """Return a request of the journal.

    Raises:
        KeyError: the content has a type that this release does not have.
    """
    types = {each.__name__: each for each in (RawChunk, RawDatum, RawTensor, *_verbs(TrainingRequest))}
    return Entry(request_id, decode_request(content, types), seq)


def changes_model(kind: str) -> bool:
    """Return whether a request of a kind may have changed its model, and must run again."""
    return any(verb.kind == kind and verb.changes_model for verb in _verbs(TrainingRequest))


def _verbs(base: type[TrainingRequest]) -> Iterator[type[TrainingRequest]]:
    for verb in base.__subclasses__():
        yield verb
        yield from _verbs(verb)
