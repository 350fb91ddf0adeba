"""Tests of the orchestration: order, validation, database, files, sampling sessions, on a backend in memory."""
