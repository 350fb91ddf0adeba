"""Plans: memory, communication and time of a layout, computed in one process, without the ranks and without weights."""
