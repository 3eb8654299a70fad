"""Reads 128-bit SASS, as far as the rules need it; which targets are known to be read right is in `archs`."""
