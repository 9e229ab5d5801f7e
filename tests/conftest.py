"""Kernels that tests compile go to one folder outside the user's own cache, kept for the whole session."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

_files = tempfile.TemporaryDirectory(prefix="jitloader-files-")
os.environ["JITLOADER_DATA_DIR"] = _files.name  # downloads, never those of the user
if "JITLOADER_CACHE_DIR" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="jitloader-tests-")
    os.environ["JITLOADER_CACHE_DIR"] = _folder.name


@pytest.fixture(autouse=True)
def jax_sleeps(request):
    """JAX starts threads, and tests that share this process fork: what uses JAX itself belongs to jax_door.py."""
    yield
    bridge = sys.modules.get("jax._src.xla_bridge")
    if request.path.name != "jax_door.py" and bridge is not None:
        assert not bridge.backends_are_initialized(), "this test, or one before it, started JAX: move it to jax_door.py"
