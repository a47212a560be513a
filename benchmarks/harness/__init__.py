"""What benchmarks share: records, tables, and where they are from."""
