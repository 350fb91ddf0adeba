"""Additions of an outsider: a loss, an option, a kind of server; each is a patch of few source files, and a forgotten one is named."""
