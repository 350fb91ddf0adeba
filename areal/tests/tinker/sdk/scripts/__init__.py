"""Scripts for the environments of the SDK, where areal is not installed."""
