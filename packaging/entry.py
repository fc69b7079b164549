"""What the frozen program runs. It has no Python beside it, so it answers to `-m MODULE` itself.

With `-m` the daemon starts its workers, and the benchmarks their other ends.
"""

import os
import runpy
import sys


def restore_library_path() -> None:
    """Programs that we start shall find the host's libraries, not ours.

    PyInstaller has set the path for this process, where the loader has read it already. A process
    of our own must set it anew, and would think that it has it from us.
    """
    before = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    os.environ.pop("LD_LIBRARY_PATH", None)
    if before is not None:
        os.environ["LD_LIBRARY_PATH"] = before
    os.environ["PYINSTALLER_RESET_ENVIRONMENT"] = "1"


restore_library_path()
if len(sys.argv) > 2 and sys.argv[1] == "-m" and sys.argv[2].split(".")[0] == "pdnode":
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    from pdnode.cli import main

    sys.exit(main())
