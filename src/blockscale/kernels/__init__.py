"""Kernels: one family a file, named for what it does and where."""
