"""Load generators that measure a node from outside, as a client sees it."""
