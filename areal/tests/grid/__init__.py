"""The parity grid: cases, layouts, models and losses, and the float64 reference that they are compared with."""
