"""Add the alpha of each adapter. That of earlier rows is in the files of the adapter."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns."""
    for table in ("models", "checkpoints"):
        op.add_column(table, sa.Column("alpha", sa.Float(), nullable=True))
