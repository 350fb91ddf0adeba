"""Planted bugs, and the runner that shows that the tests catch each of them."""
