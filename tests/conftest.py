"""Kernels that tests compile go to one folder outside the user's own cache, kept for the whole session."""

from __future__ import annotations

import os
import tempfile

if "JITLOADER_CACHE_DIR" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="jitloader-tests-")
    os.environ["JITLOADER_CACHE_DIR"] = _folder.name
