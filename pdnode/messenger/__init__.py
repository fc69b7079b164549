"""The KV messenger: core machines joined to the link, the fabric and the scheduler."""
