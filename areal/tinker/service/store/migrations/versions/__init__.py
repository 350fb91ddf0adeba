"""Revisions of the database, one file for each."""
