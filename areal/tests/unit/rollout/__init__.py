"""Rollouts in this process and on servers, the runner, and sampling."""
