"""The README: its Python blocks run in order as one program, and print what the text block after them shows."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every example runs in a fresh folder, and what is shown below one is what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, (kind, text) in enumerate(BLOCKS):
        lacking = ("jl.show(" in text and find_spec("matplotlib") is None) or (
            "jitloader.torch" in text and find_spec("torch") is None
        )
        if kind != "python" or lacking:
            continue
        capsys.readouterr()
        exec(compile(text, "train.py", "exec"), scope)
        follows = BLOCKS[number + 1] if number + 1 < len(BLOCKS) else ("", "")
        assert capsys.readouterr().out == (follows[1] if follows[0] == "text" else "")


def test_every_block_is_known() -> None:
    """A block of another kind would run nowhere; text blocks stand below the example that prints them."""
    kinds = [kind for kind, _ in BLOCKS]

    assert set(kinds) == {"python", "text"}
    assert all(kinds[i - 1] == "python" for i, kind in enumerate(kinds) if kind == "text")


def test_first_example_is_short() -> None:
    """The first example has five lines of code."""
    lines = [line for line in BLOCKS[0][1].splitlines() if line.strip()]

    assert len(lines) == 5
