"""Create the first tables. That of the lease exists: a server takes the lease before it migrates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    _create_checkpoints()
    _create_futures()
    _create_models()
    _create_sampling_sessions()
    _create_sessions()


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String(length=512), nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("uid", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("attention", sa.Boolean(), nullable=True),
        sa.Column("mlp", sa.Boolean(), nullable=True),
        sa.Column("head", sa.Boolean(), nullable=True),
        sa.Column("optimizer", sa.String(length=64), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("path"),
        sa.UniqueConstraint("uid"),
    )
    op.create_index("checkpoints_by_expiry", "checkpoints", ["expires"], unique=False)
    op.create_index(op.f("ix_checkpoints_run_id"), "checkpoints", ["run_id"], unique=False)


def _create_futures() -> None:
    op.create_table(
        "futures",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=True),
        sa.Column("model_id", sa.String(length=128), nullable=True),
        sa.Column("sampling_session_id", sa.String(length=128), nullable=True),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("category", sa.String(length=16), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("finished", sa.Float(), nullable=True),
        sa.Column("delivered", sa.Float(), nullable=True),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("notes", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("request_id"),
        sa.UniqueConstraint("model_id", "seq_id", name="futures_of_a_model"),
        sa.UniqueConstraint("sampling_session_id", "seq_id", name="futures_of_a_sampling_session"),
    )
    op.create_index(op.f("ix_futures_session_id"), "futures", ["session_id"], unique=False)
    op.create_index(op.f("ix_futures_state"), "futures", ["state"], unique=False)


def _create_models() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("attention", sa.Boolean(), nullable=True),
        sa.Column("mlp", sa.Boolean(), nullable=True),
        sa.Column("head", sa.Boolean(), nullable=True),
        sa.Column("optimizer", sa.String(length=64), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("last_request", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_models_session_id"), "models", ["session_id"], unique=False)


def _create_sampling_sessions() -> None:
    op.create_table(
        "sampling_sessions",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=True),
        sa.Column("uid", sa.String(length=64), nullable=True),
        sa.Column("run_id", sa.String(length=128), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("session_id", "seq_id", name="sampling_sessions_of_a_session"),
    )
    op.create_index(op.f("ix_sampling_sessions_session_id"), "sampling_sessions", ["session_id"], unique=False)


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("sdk_version", sa.String(length=255), nullable=True),
        sa.Column("project_id", sa.String(length=255), nullable=True),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.Column("reason", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
