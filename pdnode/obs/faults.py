"""Faults of this program that are found where nobody would hear of them."""

import asyncio


def report(error: Exception, text: str) -> None:
    """Give an exception that nobody foresaw to the event loop's handler. The one of a daemon
    (daemon/node.py) logs it, and ends the process if it is a broken assertion.
    """
    asyncio.get_running_loop().call_exception_handler({"message": text, "exception": error})
