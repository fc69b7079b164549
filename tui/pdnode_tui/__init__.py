"""The Textual console, `pdnode top`. It imports nothing of the daemon but `pdnode.obs.snapshot`."""
