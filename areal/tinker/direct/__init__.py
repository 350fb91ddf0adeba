"""The verbs of the Tinker protocol as plain calls of one thread, without HTTP, event loop or database: for programs and other frameworks."""
