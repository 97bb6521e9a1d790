"""Tools around the library: caches, documentation, benchmarks, the quickstart."""

import opensora  # before torch: it sets how OpenMP waits
