"""Tables of the database. Times are seconds since the epoch. The migrations create these tables."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    select,
)

metadata = MetaData()

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(64), nullable=False),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_space", String(128), nullable=False),  # where the pid is unique; empty if unknown
    Column("expires", Float, nullable=False),
)
"""One row: the server that may write."""

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(64), nullable=False, server_default="", index=True),  # empty: from before there were owners
    Column("state", String(16), nullable=False),  # live, over
    Column("tags", JSON),
    Column("user_metadata", JSON),
    Column("sdk_version", String(255)),
    Column("project_id", String(255)),
    Column("display_name", Text),
    Column("created", Float, nullable=False),
    Column("ended", Float),
    Column("reason", JSON),
)

models = Table(
    "models",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("session_id", String(64), nullable=False, index=True),
    Column("model_seq_id", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),  # creating, live, released, failed, lost
    Column("base_model", Text, nullable=False),
    Column("rank", Integer),
    Column("seed", BigInteger),
    Column("attention", Boolean),
    Column("mlp", Boolean),
    Column("head", Boolean),
    Column("alpha", Float),
    Column("optimizer", String(64), nullable=False),
    Column("user_metadata", JSON),
    Column("created", Float, nullable=False),
    Column("last_request", Float, nullable=False),
    Column("snapshot_uid", String(64)),  # of the folder from which a restart restores the model
    Column("snapshot_seq", BigInteger),  # number of the last request that the snapshot contains
    Column("begun_seq", BigInteger),  # number of the last request that has begun in this server
)

futures = Table(
    "futures",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("owner", String(64), nullable=False, server_default=""),
    Column("session_id", String(64), index=True),
    Column("model_id", String(128)),
    Column("sampling_session_id", String(128)),
    Column("seq_id", BigInteger),
    Column("kind", String(32), nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False, index=True),  # pending, done, failed, gone, pruned
    Column("result", LargeBinary),
    Column("error", Text),
    Column("category", String(16)),
    Column("created", Float, nullable=False),
    Column("finished", Float),
    Column("delivered", Float),
    Column("loss", Float),
    Column("tokens", BigInteger),
    Column("notes", JSON),  # provenance spans and other information that is stored only
    UniqueConstraint("model_id", "seq_id", name="futures_of_a_model"),
    UniqueConstraint("sampling_session_id", "seq_id", name="futures_of_a_sampling_session"),
)

journal = Table(
    "journal",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("model_id", String(128), nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("attempts", Integer, nullable=False),  # servers that have ended after the request had begun
)
"""Requests of live models that are not in a snapshot: those that wait, and those to run again after a restart."""

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String(512), primary_key=True),
    Column("run_id", String(128), nullable=False, index=True),
    Column("kind", String(16), nullable=False),  # training, sampler
    Column("name", String(255), nullable=False),
    Column("uid", String(64), nullable=False, unique=True),
    Column("base_model", Text, nullable=False),
    Column("rank", Integer),
    Column("seed", BigInteger),
    Column("attention", Boolean),
    Column("mlp", Boolean),
    Column("head", Boolean),
    Column("alpha", Float),
    Column("optimizer", String(64), nullable=False),
    Column("user_metadata", JSON),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("size_bytes", BigInteger, nullable=False),
    Column("public", Boolean, nullable=False),
    Column("seq_id", BigInteger),  # number of the request that saved it
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("session_id", String(64), nullable=False, index=True),
    Column("seq_id", BigInteger),
    Column("state", String(16), nullable=False),  # live, over
    Column("base_model", Text, nullable=False),
    Column("model_path", Text),
    Column("uid", String(64)),  # of the weights: a checkpoint's or an ephemeral folder's; none for the base model
    Column("run_id", String(128)),  # of an ephemeral snapshot
    Column("size_bytes", BigInteger, nullable=False, server_default="0"),  # of an ephemeral snapshot
    Column("created", Float, nullable=False),
    UniqueConstraint("session_id", "seq_id", name="sampling_sessions_of_a_session"),
)

Index("checkpoints_by_expiry", checkpoints.c.expires)
Index("journal_of_a_model", journal.c.model_id, journal.c.seq_id)


def runs_of(owner: str) -> Select[tuple[str]]:
    """Return the query for the ids of the runs of an owner."""
    return select(models.c.id).join(sessions, sessions.c.id == models.c.session_id).where(sessions.c.owner == owner)
