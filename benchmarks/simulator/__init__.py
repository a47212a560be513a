"""`jmoe demo` and `jmoe bench priority` over many seeds in the simulator of `serving.bench`."""
