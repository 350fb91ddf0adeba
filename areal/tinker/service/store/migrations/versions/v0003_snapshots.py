"""Add the snapshot of each model and the journal of requests since then. Models of earlier rows have none, and are lost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns and the table."""
    op.add_column("models", sa.Column("snapshot_uid", sa.String(length=64), nullable=True))
    op.add_column("models", sa.Column("snapshot_seq", sa.BigInteger(), nullable=True))
    op.add_column("checkpoints", sa.Column("seq_id", sa.BigInteger(), nullable=True))
    op.create_table(
        "journal",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("model_id", sa.String(length=128), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("journal_of_a_model", "journal", ["model_id", "seq_id"], unique=False)
