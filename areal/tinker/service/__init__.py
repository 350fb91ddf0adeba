"""Orchestration of the training server: database, order, validation, scheduling and files, without any framework."""
