"""Training that sees the rounding of inference servers: formats, and layers that compute with rounded operands."""
