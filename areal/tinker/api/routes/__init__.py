"""Routes of the server, one module for each topic."""
