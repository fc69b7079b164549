"""For all suites: what the developer's environment holds must not change a result."""

import os

# A daemon under systemd has these; a test that wants one sets it.
for _name in ("PDNODE_CONFIG", "CREDENTIALS_DIRECTORY", "JOURNAL_STREAM", "NOTIFY_SOCKET"):
    os.environ.pop(_name, None)
