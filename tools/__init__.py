"""Tools around the library: caches, documentation, benchmarks, the quickstart."""
