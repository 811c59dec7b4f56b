"""The contract that the web side and the worker both import.

Settings, schemas, errors, the jobs in Redis and their event streams. It imports neither side.
"""
