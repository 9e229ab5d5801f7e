"""What an editor and mypy see of the public names: a program in all its parts passes, and slips are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jitloader as jl

pytest.importorskip("mypy")

PROGRAM = '''
from typing import Any, NamedTuple
import numpy as np
import jitloader as jl

class Batch(NamedTuple):
    image: np.ndarray
    label: np.ndarray

data: jl.Dataset = jl.Dataset(image=np.zeros((100, 8, 8, 3), "uint8"), label=np.arange(100))
train, valid = data.split(0.8, 0.2)
train = train.map("image", jl.random_flip(), jl.scale(), jl.channels_first()).map(("label",), lambda x: x + 1)
names: tuple[str, ...] = train.fields
spec: dict[str, jl.Spec] = train.spec
loader: jl.Loader = jl.Loader(train, 16, order=jl.blocks(8, 4), seed=1, rank=0, world_size=2, tail="drop")
batch: Batch
for batch in loader:
    image: np.ndarray = batch.image
count: int = len(loader)
state: dict[str, Any] = loader.state_dict()
loader.load_state_dict(state)
text: str = train.explain()
stage: jl.Stage = jl.normalize(0.0, 1.0)
order: jl.Order = jl.weighted(np.ones(100))
'''

SLIPS = {
    "jl.Loader([1, 2], 4)": 'Argument 1 to "Loader" has incompatible type "list[int]"; expected "Dataset | Mix | Live"',
    "jl.Loader(data, 4, shufle=True)": 'Unexpected keyword argument "shufle" for "Loader"',
    "data.mapp": '"Dataset" has no attribute "mapp"',
    "jl.random_crop()": 'Missing positional argument "size" in call to "random_crop"',
    "len(data.take('3'))": 'Argument 1 to "take" of "Dataset" has incompatible type "str"; expected "int"',
}


def test_programs_type(tmp_path):
    """The program passes in strict mode; each slip is one error on its line."""
    slips = "import numpy as np\nimport jitloader as jl\ndata = jl.Dataset(x=np.zeros(3))\n"
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "slips.py").write_text(slips + "\n".join(SLIPS) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent"]
    command += ["--cache-dir", str(tmp_path / "cache")]
    env = {**os.environ, "MYPYPATH": str(Path(jl.__file__).parents[1])}
    done = subprocess.run(
        [*command, "program.py", "slips.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env
    )
    lines = [line for line in done.stdout.strip().splitlines() if ": note: " not in line]
    assert len(lines) == len(SLIPS), done.stdout + done.stderr
    for line, (number, text) in zip(lines, enumerate(SLIPS.values(), 4), strict=True):
        assert line.startswith(f"slips.py:{number}: error: ") and text in line
