"""Episodes, the runner, rewards and recorded samples."""
