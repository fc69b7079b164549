"""A process of test_fake_suite.py: a registration that is held is let go by another thread, which
needs the GIL for it. Says the number of the region.
"""

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from pdnode.fabric._native import Fabric

SIZE_BYTES = 64 * mmap.PAGESIZE

library = sys.argv[1]
fake = ctypes.CDLL(library)
fabric = Fabric(library, "verbs", "adaptive")
fabric.add_group([("lo", "127.0.0.1")])
fd = os.memfd_create("kv")
os.ftruncate(fd, SIZE_BYTES)
assert fake.fake_control(b"hold_registrations", ctypes.c_int64(1)) == 0
with ThreadPoolExecutor(1) as pool:
    added = pool.submit(fabric.add_region, 0, fd, SIZE_BYTES, mmap.PAGESIZE)
    # What the daemon's loop does meanwhile.
    while not fake.fake_count(b"waiting"):
        assert fabric.take_events() == []
    assert not added.done()
    fake.fake_control(b"hold_registrations", ctypes.c_int64(0))
    sys.stdout.write(f"{added.result()}\n")
fabric.close()
