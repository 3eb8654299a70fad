"""The fast CPU backend."""
