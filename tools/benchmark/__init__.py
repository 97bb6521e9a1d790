"""Benchmarks; docs/explanation/benchmarks/ holds what they printed, on what."""
