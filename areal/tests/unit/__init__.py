"""Tests in one process, without an engine on several ranks."""
