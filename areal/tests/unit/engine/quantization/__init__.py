"""Operands that round as inference servers do."""
