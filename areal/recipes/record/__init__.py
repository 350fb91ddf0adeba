"""What a run leaves behind: its settings and code, numbers of each step, samples, and curves."""
