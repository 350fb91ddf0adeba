"""What layers keep for their backward, and where it is."""
