"""Low-rank adapters (LoRA) for any engine whose linear layers have Hugging Face names: training, files in peft's
format, merging.
"""
