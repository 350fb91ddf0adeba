"""Start of a real SGLang server on a CPU: with a stub of its kernels, and without what needs an accelerator."""
