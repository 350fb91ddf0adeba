"""Messages, tokens and chat templates."""
