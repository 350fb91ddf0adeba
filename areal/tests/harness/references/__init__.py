"""References of one process, computed one sequence at a time."""
