"""Sizes for a smoke run, and the tables that the session prints at its end."""

from __future__ import annotations

import os
import platform

import numpy as np
import pytest
from interleave import TABLES


@pytest.fixture(scope="session")
def small(request: pytest.FixtureRequest) -> bool:
    """Whether only correctness counts: under `--benchmark-disable` sizes are small and there is one round."""
    return bool(request.config.getoption("benchmark_disable"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables of interleaved rounds; those of a smoke run would say nothing."""
    if not TABLES or config.getoption("benchmark_disable"):
        return
    terminalreporter.section("interleaved rounds")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{platform.machine()}, {cpus} CPUs, Python {platform.python_version()}, NumPy {np.__version__}"
    terminalreporter.write_line(machine)
    for title, lines in TABLES:
        terminalreporter.write_line("")
        terminalreporter.write_line(title, bold=True)
        for line in lines:
            terminalreporter.write_line(f"  {line}")
