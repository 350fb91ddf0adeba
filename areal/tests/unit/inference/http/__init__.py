"""Tests of rollouts on HTTP servers."""
