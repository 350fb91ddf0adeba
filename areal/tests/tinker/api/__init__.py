"""Tests of the HTTP layer on a stand-in of the service, in one process."""
