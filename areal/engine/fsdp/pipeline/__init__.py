"""Pipeline parallelism of the FSDP engine, based on ``torch.distributed.pipelining``: split, chunks, schedules, tied
embeddings.
"""
