"""Every causal language model of the installed transformers, shrunk and compared with transformers on one rank."""
