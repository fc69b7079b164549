"""Measures a node from outside, as a client sees it, and the transfer core against libfabric."""
