"""What tests with several NICs need of the machine."""

import os
import shutil

import pytest

NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))),
    reason="network namespaces need root, ip and tc",
)
