"""Settings of the orchestration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal.tinker.service.tenants.caller import Quotas


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Times and sizes of a service. Each is an option of ``areal serve``.

    Attributes:
        session_timeout_s: Seconds without a request after which a session ends and its adapters are released.
        gap_timeout_s: Seconds for which requests wait for a missing seq_id before they fail.
        lease_s: Seconds after which another server may take the database of a killed one. Renewed four times as often.
        max_queued: Most training requests that wait, of all models.
        max_queued_per_model: Most training requests of one model that wait.
        max_samples: Most sampling requests that wait or run.
        running_samples: Most sampling requests that run at the same time.
        max_open_snapshots: Most snapshots that the sampler has open, apart from those in use. Others are read again when they are used.
        max_num_samples: Most answers of one sampling request. The sampler may have a lower limit.
        max_top_k: Most log-probs per position that a sampling request may ask for. The sampler may have a lower limit.
        max_dense_elements: Most elements of the targets or values of one request, after sparse tensors are made dense.
        result_keep_s: Seconds for which a delivered result is kept, and for which the rows of an ended session are kept.
        disk_reserve_mib: MiB of disk that are kept for a SQLite database when the disk is full. At most a tenth of the disk.
        snapshot_idle_s: Seconds without a request after which an ephemeral snapshot is deleted, if its session lives on.
        recovery: Whether live models survive the end of the process: their requests and snapshots of them are stored.
        recovery_steps: Optimizer steps of a model after which it is stored, so that a restart runs no more than these again.
        recovery_s: Seconds after which a model with new steps is stored.
        recovery_fraction: Largest fraction of the time that storing models takes. The steps and seconds grow until it is kept.
        timeout_keep_s: Seconds for which the checkpoint of a model is kept whose session has timed out.
    """

    session_timeout_s: float = 600.0
    gap_timeout_s: float = 600.0
    lease_s: float = 20.0
    max_queued: int = 8192
    max_queued_per_model: int = 2048
    max_samples: int = 8192
    running_samples: int = 1024
    max_open_snapshots: int = 64
    max_num_samples: int = 1024
    max_top_k: int = 1024
    max_dense_elements: int = 2**25
    result_keep_s: float = 3600.0
    snapshot_idle_s: float = 86_400.0
    disk_reserve_mib: int = 64
    recovery: bool = True
    recovery_steps: int = 100
    recovery_s: float = 60.0
    recovery_fraction: float = 0.05
    timeout_keep_s: int = 7 * 86_400

    def __post_init__(self) -> None:
        """Refuse limits with which no request can succeed."""
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{name} is {value}: it must be above 0")
        if self.recovery_fraction > 1:
            raise ValueError(f"recovery_fraction is {self.recovery_fraction}: it must be at most 1")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(ServiceLimits):
    """Settings of a :class:`~areal.tinker.service.service.Service`.

    Attributes:
        root: folder of checkpoints and, by default, of the database. One server at a time.
        base_models: names under which clients may ask for the base model; the first is the one that answers state.
        model_path: directory or hub name of the base model, from which clients load their tokenizer.
        database_url: SQLAlchemy URL; ``None`` for SQLite in ``root``.
        owner: name of the only caller of a server without a list of users.
        quotas: quotas of owners that have some, by name.
    """

    root: Path
    base_models: tuple[str, ...]
    model_path: str
    database_url: str | None = None
    owner: str = "local"
    quotas: Mapping[str, Quotas] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse settings with which no request can succeed."""
        super().__post_init__()
        # A client must be able to name the model, and to see it in the listing of capabilities.
        if not self.base_models or not all(self.base_models):
            raise ValueError(f"base_models is {self.base_models!r}: give at least one name of the base model")

    @property
    def url(self) -> str:
        """URL of the database."""
        return self.database_url or f"sqlite:///{Path(self.root).resolve() / 'tinker.db'}"
