"""Tools that look at kernels from outside; they work on any library and import nothing of `blockscale.nn`."""
