"""Memory of an engine: its record over time, and what a process keeps."""
