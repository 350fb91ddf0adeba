"""Backends that sample: this process, or servers."""
