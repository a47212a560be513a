"""`jmoe demo` over many seeds in the simulator of `serving.bench`."""
