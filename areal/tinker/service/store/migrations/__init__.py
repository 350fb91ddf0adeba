"""Alembic migrations of the database, which the server runs when it starts."""
