"""Plans against worlds that exist."""
