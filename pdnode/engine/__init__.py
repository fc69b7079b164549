"""The model: a worker process per TP rank. Only `engine.worker` and what it imports touch torch."""
