"""Pipeline parallelism of the FSDP engine on ``torch.distributed.pipelining``."""
