"""What an editor and mypy know of a user's script."""

import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np, jitloader as jl, jitloader.ray
data = jl.Dataset(x=np.zeros((4, 2)))
loader = jl.Loader(data.map("x", jl.scale()), 2)
count: int = len(loader)
state: dict[str, object] = loader.state_dict()
train, *others = data.split(0.5, 0.5)
one: jl.Dataset = train
resumed: bool = jl.ray.resume(loader)
with loader as entered:
    for batch in entered:
        batch.x
jl.Loader(data, "2")
jl.Loader(data, 2, shufle=True)
data.nothing
resumed = jl.ray.from_ray(data)
"""


@pytest.mark.nightly
def test_a_script_is_typed(tmp_path):
    """Right lines pass; a wrong type, a misspelt option, an unknown method and a wrong result are each told on their line."""
    pytest.importorskip("mypy")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    told = [(line.split(":")[1], line.rpartition("[")[2]) for line in done.stdout.splitlines() if ": error:" in line]
    assert told == [("13", "arg-type]"), ("14", "call-arg]"), ("15", "attr-defined]"), ("16", "assignment]")], done.stdout
