"""The aiohttp surface: OpenAI routes, probes and metrics, and the peer link."""
