"""Everything that is to run on an H200, in resumable parts: `python -m benchmarks.gpu`."""
