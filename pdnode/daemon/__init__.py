"""The daemon: the one place where parts are built and joined. Nothing but the CLI imports it."""
