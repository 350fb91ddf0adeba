"""Objects of the driver that stand for objects on the ranks."""
