"""The pure core: no torch, asyncio, sockets, clock or randomness: a simulator can run it."""
