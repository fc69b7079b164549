"""Prints what the greedy parity rows found, whatever verbosity pytest runs with."""

import pytest

from tests.shardings.parity import TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE:
        terminalreporter.section("greedy parity with the TP 1 reference, fp32")
        for line in TABLE:
            terminalreporter.write_line(line)
