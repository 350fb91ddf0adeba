"""Environment of Alembic: runs the revisions on the connection that the server passes."""

from __future__ import annotations

from alembic import context

from areal.tinker.service.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
