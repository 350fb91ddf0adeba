"""Train engines: the template, what it composes (schedules, context parallelism, attention), a folder per engine."""
