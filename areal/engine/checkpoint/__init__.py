"""Atomic checkpoint directories in the Hugging Face format and the format of torch.distributed.checkpoint."""
