"""Measurements: what they measure is in the docstring of each module, what was found in docs/benchmarks.md."""
