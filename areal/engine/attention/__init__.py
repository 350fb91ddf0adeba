"""Packed attention and context parallelism: kernels, their registration with transformers, and exchange over ranks."""
