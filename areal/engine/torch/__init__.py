"""What engines of torch modules share, sharded or not: weights, checkpoints, offload, gradient norm, the stages of a rank."""
