"""Benchmarks; docs/benchmarks/ holds what they printed, on what."""
