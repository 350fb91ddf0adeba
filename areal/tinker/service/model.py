"""A model of this process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from areal.tinker.backends.prepared import AdapterSpec
from areal.tinker.service.store.futures import Category


@dataclass(eq=False)
class TrainedModel:
    """An adapter of the base model, and the session that owns it.

    Attributes:
        owner: owner of the session.
        spec: adapter; ``None`` until a model that is created from a checkpoint is loaded.
        in_backend: whether the backend may have an adapter of this name.
        pending: its gradients wait for a step. The model cannot be stored then.
        loaded: its weights are those of a checkpoint, which may be deleted: the model must be stored.
        closed: why the model takes no more requests.
        blame: category of the failure of a request that comes after that.
    """

    id: str
    session_id: str
    owner: str
    base_model: str
    optimizer: str
    created: float = field(default_factory=time.time)
    spec: AdapterSpec | None = None
    user_metadata: Any = None
    in_backend: bool = False
    pending: bool = False
    loaded: bool = False
    closed: str | None = None
    blame: Category = "user"
    last_request: float = field(default_factory=time.time)
