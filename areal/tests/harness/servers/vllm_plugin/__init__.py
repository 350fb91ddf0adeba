"""A weight transfer backend that tests bring to vLLM: this folder is on the ``PYTHONPATH`` of the server, with the entry point."""
