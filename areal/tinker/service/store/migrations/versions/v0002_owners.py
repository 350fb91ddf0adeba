"""Add owners of sessions and of requests, and sizes of snapshots. The owner of earlier rows is empty: they belong to the administrators."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns."""
    for table in ("sessions", "futures"):
        op.add_column(table, sa.Column("owner", sa.String(length=64), nullable=False, server_default=""))
    op.create_index(op.f("ix_sessions_owner"), "sessions", ["owner"], unique=False)
    op.add_column("sampling_sessions", sa.Column("size_bytes", sa.BigInteger(), nullable=False, server_default="0"))
