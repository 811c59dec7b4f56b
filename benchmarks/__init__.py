"""Measurements of whole servers, run from a checkout: `python -m benchmarks.compare`, `python -m benchmarks.cpu`."""
