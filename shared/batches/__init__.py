"""Batches: a file of requests run as jobs of priority `batch`, by a process of its own."""
