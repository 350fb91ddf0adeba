"""Processes that send the requests of one owner of servers."""
