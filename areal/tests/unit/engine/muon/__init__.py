"""Muon without engines."""
