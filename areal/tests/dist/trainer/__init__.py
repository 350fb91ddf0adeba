"""Tests of the trainers on several ranks."""
