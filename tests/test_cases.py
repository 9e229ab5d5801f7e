"""The cases from public reports, where the file that holds them is at hand; each in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
CASES = HERE.parent.parent / "shared" / "cases" / "cases.md"


def blocks():
    if not CASES.exists():
        return []
    found = re.findall(r"^### ([A-Z]\d+) .*?$(.*?)(?=^### |^## |\Z)", CASES.read_text(), re.M | re.S)
    return [pytest.param(code, id=name) for name, body in found for code in re.findall(r"^```python\n(.*?)^```", body, re.M | re.S)]


@pytest.mark.parametrize("code", blocks())
def test_case(code):
    """The case runs to its end; memory is measured on a second run, when no compiler is in the process."""
    source = "from adapter import *\nimport numpy as np, os, sys\n" + code
    for _ in range(2 if "anon()" in code else 1):
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, cwd=HERE / "cases",
            env={**os.environ, "PYTHONPATH": str(HERE / "cases")},
        )  # fmt: skip
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr[-800:]
