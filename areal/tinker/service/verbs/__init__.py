"""Verbs that train: each is a class of requests, which declares its kind, its validation, its execution and its batching."""
