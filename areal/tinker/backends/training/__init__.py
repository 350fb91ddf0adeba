"""Backends that train: an engine, its passes and its adapters."""
