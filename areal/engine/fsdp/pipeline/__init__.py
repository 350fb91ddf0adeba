"""Pipeline parallelism of the FSDP engine, based on ``torch.distributed.pipelining``: schedules, and tied embeddings."""
