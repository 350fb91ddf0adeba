"""Float8 products of torchao, emulated on the CPU: ``make test-torchao``."""
