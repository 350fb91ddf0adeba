"""Tests of dispatch without ranks."""
