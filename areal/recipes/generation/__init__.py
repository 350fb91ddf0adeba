"""Where the answers of a run come from: a replica of the model on each rank, or servers, which may be started for the run."""
