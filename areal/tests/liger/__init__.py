"""Kernels of Liger-Kernel, computed by Triton's interpreter on a CPU: ``make test-liger``."""
