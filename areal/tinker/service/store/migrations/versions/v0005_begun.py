"""Add the number of the last request of each model that has begun. Requests of earlier rows count as waiting."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column."""
    op.add_column("models", sa.Column("begun_seq", sa.BigInteger(), nullable=True))
