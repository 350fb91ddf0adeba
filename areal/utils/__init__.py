"""Pure helpers: nothing here knows an engine."""
