"""Starts the Triton kernels: outputs, workspaces, tile sizes and grids."""
