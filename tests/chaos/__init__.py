"""Longer runs in which processes are killed at random moments; each is a script behind a target of the Makefile."""
