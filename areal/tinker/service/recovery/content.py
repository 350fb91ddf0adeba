"""Requests of the journal from their stored form."""

from __future__ import annotations

from collections.abc import Iterator

from areal.tinker.backends.prepared import decode_request
from areal.tinker.service.order import Entry
from areal.tinker.service.requests import RawChunk, RawDatum, RawTensor
from areal.tinker.service.verbs.verb import TrainingRequest


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
