"""Compares settings in pairs: `python -m benchmarks.pairs --list` says which (`table.PAIRS`)."""
