"""The processes of JAX: the world that they join, their connections, compiled programs, and profiles."""
