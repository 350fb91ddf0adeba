"""Recovery of live models: snapshots, the journal of requests since then, and what is left of an earlier process."""
