"""The programs of a step, compiled ahead of time for devices that are not there: shapes only, no array is made."""
