"""What the daemon shows of itself: log lines, metrics, records of requests and transfers."""
