"""The README: its Python blocks run in order as one program, and print what the text block after them shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
# Rows of the table of trust whose number is that of the tests that pytest collects: by file, names or how they begin.
TRIED = {
    "disk full": {
        "storage_faults": "a_full_disk a_file_that_may_not_grow truncated replaced removed rewritten changed_between "
        "cut_before",
        "storage": "npy_cut manifests_that_are_broken",
        "storage_unpacked": "broken_members no_room parquet_that a_file_that_changes where_unpacked who_comes",
        "chunked": "a_broken a_file_that_changed a_file_swapped folders_and_files_without",
        "cache": "a_full_disk a_damaged_file",
        "write": "a_real_full_disk the_old_version_stays power_loss",
        "faults": "a_file_that",
        "loader": "a_file_cut",
        "jit": "a_full_disk a_damaged_file a_folder_that_others_can_write no_folder_to_be_had",
    },
    "downloads": {
        "remote": "passing_faults lasting_faults a_cut_range a_change_in a_file_that_never_rests a_damaged_part "
        "a_killed_download a_full_disk a_file_over_the_limit a_file_system_that_fails an_unreachable_server "
        "answers_to ranges_that_end digests_that",
    },
    "a limit on memory": {
        "faults": "a_limit_on_memory a_thread_that_is_ended an_interrupted_write",
        "loader": "no_memory_for_the_buffers no_more_threads a_thread_that_cannot_start an_iterator_can_change many_loaders ctrl_c "
        "threads_end iterators_are_independent fork_in_the_middle",
        "process": "an_interrupt an_event_loop children_made",
        "cache": "interrupted",
        "storage": "ctrl_c a_forked_child",
        "chunked": "two_loaders_at_once after_a_fork",
        "layers": "layer",
    },
}
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


def test_the_table_of_trust_counts_right() -> None:
    """Its rows tell as many tests as there are."""
    files = sorted({f"test_{name}.py" for row in TRIED.values() for name in row})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only", "-q"]
    told = subprocess.run(
        [*command, "-o", "addopts=", "-m", "not nightly", *files],
        cwd=Path(__file__).parent,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    ).stdout
    found = re.findall(r"test_(\w+)\.py::test_(\w+)", told)
    absent = {name for row in TRIED.values() for name in row} - {file for file, _ in found}
    if absent:
        pytest.skip(f"not installed: what tests of {', '.join(sorted(absent))} need")
    for row, names in TRIED.items():
        starts = [(file, start) for file, many in names.items() for start in many.split()]
        for file, start in starts:
            assert any(f == file and name.startswith(start) for f, name in found), f"{file}: no test {start}"
        count = sum(any(f == file and name.startswith(start) for file, start in starts) for f, name in found)
        assert re.search(rf"^\| {row}.*\| {count} tests \| 0\b", README.read_text(), re.MULTILINE), (
            f"{row}: {count} tests"
        )
