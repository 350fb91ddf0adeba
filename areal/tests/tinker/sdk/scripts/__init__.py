"""Scripts for the environments of the SDK, which have no areal."""
