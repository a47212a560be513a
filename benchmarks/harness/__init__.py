"""What the benchmarks for a GPU share: the command line, the records, and the loop over cases."""
