"""The notebook: kept without outputs, and run from top to bottom."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[1] / "benchmarks" / "tour.ipynb"
CELLS = json.loads(TOUR.read_text())["cells"]


def test_no_outputs_are_kept() -> None:
    """What a run printed is of that machine, and no part of the source."""
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]

    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell runs, warnings are errors, and what a cell ends with is shown as a notebook would."""
    for extra in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("MPLBACKEND", "agg")
    scope: dict[str, Any] = {"__name__": "__main__"}
    shown = 0
    for cell in CELLS:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {cell['id']}", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {cell['id']}", "eval"), scope)  # type: ignore[attr-defined]
            for show in ("__repr__", "_repr_html_", "_repr_png_"):
                shown += bool(getattr(value, show, lambda: None)())
    import matplotlib.pyplot as plt

    plt.close("all")
    out = capsys.readouterr().out
    assert shown > 10
    assert "one_hot(10) takes one integer a row, 0 to 9; got float32 (8, 8, 1)" in out
    assert "digits never seen are named right" in out
    assert "images/s" in out


@pytest.mark.nightly
def test_tour_runs_in_a_kernel() -> None:
    """The same in a real notebook kernel: every figure comes as a picture."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(TOUR, 4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    kinds = [kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})]

    assert kinds.count("image/png") == 4
    assert kinds.count("text/html") == 2
