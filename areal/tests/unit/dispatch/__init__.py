"""Tests of dispatch in one process: shards, the wire format, and the driver's objects."""
