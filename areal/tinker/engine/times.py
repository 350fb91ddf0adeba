"""Times as the protocol writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as an ISO 8601 time with its zone."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
