"""Generation and updates of weights on a real vLLM server: ``make test-vllm`` installs the server and runs these tests."""
