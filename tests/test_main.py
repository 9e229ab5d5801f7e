"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jitloader.__main__ import copy_epoch, main, numpy_epoch
from jitloader.tables import size_of


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A data set of two fields, as a folder of .npy files."""
    path = tmp_path / "data"
    path.mkdir()
    np.save(path / "image.npy", np.zeros((300, 4, 4), np.uint8))
    np.save(path / "label.npy", np.arange(300))
    return str(path)


def test_inspect_shows_fields(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` prints a line a field: name, dtype, shape of a row, bytes a row, bytes in all."""
    assert main(["inspect", folder]) == 0

    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: 300 rows, 2 fields, {size_of(300 * 16 + 300 * 8)}",
        "  field  dtype  row     bytes a row  size",
        "  image  uint8  (4, 4)  16           4,800 B",
        "  label  int64  ()      8            2,400 B",
    ]


def test_inspect_shows_values(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect --values` adds what `describe` finds."""
    assert main(["inspect", folder, "--values"]) == 0

    assert capsys.readouterr().out.splitlines()[4:] == [
        "300 rows",
        "  field  type          count  nan  inf  mean   std   min  max  histogram",
        "  image  uint8 (4, 4)  4,800  0    0    0      0     0    0    █",
        "  label  int64 ()      300    0    0    149.5  86.6  0    299  ████████████████████",
    ]


def test_convert_writes_a_folder(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`convert` writes what a path holds to a folder, and shows it; a folder that is no folder is one line."""
    assert main(["convert", f"{folder}/label.npy", str(tmp_path / "out")]) == 0

    assert np.load(tmp_path / "out" / "label.npy").tolist() == list(range(300))
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path / 'out'}: 300 rows, 1 fields, {size_of(2400)}"
    assert main(["convert", folder, f"{folder}/label.npy"]) == 2
    assert "label.npy" in capsys.readouterr().err


def test_bench_times_three_ways(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench` prints a rate for the loader, for np.take and for a memcpy."""
    assert main(["bench", folder, "--batch-size", "64"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: 300 of 300 rows, 24 bytes each, in batches of 64"
    rates = [re.fullmatch(r"  (.*?) +([\d,]+) rows/s +([\d.]+) GB/s", line) for line in lines[2:-1]]
    assert [rate and rate[1] for rate in rates] == ["jitloader", "np.take(out=, mode='clip')", "memcpy, one thread"]
    assert re.match(r"  loader \d+ % of the step", lines[-1])
    assert all(rate and int(rate[2].replace(",", "")) > 0 for rate in rates)


def test_numpy_epoch_takes_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NumPy epoch beside which `bench` puts the loader reads each row once."""
    taken = []
    take = np.take
    monkeypatch.setattr(np, "take", lambda a, i, **options: taken.extend(i.tolist()) or take(a, i, **options))

    numpy_epoch([np.arange(10.0)], 4)()

    assert sorted(taken) == list(range(10))


def test_memcpy_moves_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memcpy beside which `bench` puts the loader copies all the bytes of an epoch."""
    moved = []
    monkeypatch.setattr(np, "copyto", lambda target, source: moved.append((len(target), len(source))))

    copy_epoch(total=1000, batch=300)()

    assert moved == [(300, 300), (300, 300), (300, 300), (100, 100)]


@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_bad_path_is_one_line_and_code_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is not there, an empty folder and a file that is no array end in one line and exit code 2."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npy").write_text("hello")
    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path / "text.npy"):
        assert main([command, str(path)]) == 2

        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"jitloader {command}: ")
        assert captured.err.count("\n") == 1
        assert path.name in captured.err


def test_bench_of_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A data set without rows has no rate."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((0, 3)))

    assert main(["bench", str(path)]) == 2
    assert capsys.readouterr().err == f"jitloader bench: {path} has no rows\n"


@pytest.mark.parametrize("arguments", [[], ["train"], ["bench", "x.npy", "--batch-size", "0"], ["inspect"]])
def test_bad_arguments_are_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that mean nothing end in usage and exit code 2."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)

    assert raised.value.code == 2
    assert "usage: python -m jitloader" in capsys.readouterr().err


def test_no_traceback_in_a_process(tmp_path: Path) -> None:
    """The exit code reaches the shell, and no traceback is shown."""
    command = [sys.executable, "-m", "jitloader", "inspect", str(tmp_path / "missing")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_demo_names_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without scikit-learn the demo says what to install."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    assert main(["demo"]) == 2
    message = "the demo's digits come with scikit-learn: pip install 'jitloader[demo]'"
    assert capsys.readouterr().err == f"jitloader demo: {message}\n"


def test_demo_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo reaches 95 % on held-out digits, through the loader and through NumPy."""
    pytest.importorskip("sklearn")

    assert main(["demo"]) == 0

    accuracies = re.findall(r"accuracy ([\d.]+)% on 359 held-out rows", capsys.readouterr().out)
    assert len(accuracies) == 2
    assert min(map(float, accuracies)) >= 95
