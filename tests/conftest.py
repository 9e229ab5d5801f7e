"""Kernels that tests compile go to one folder outside the user's own cache, kept for the whole session."""

from __future__ import annotations

import os
import tempfile

_files = tempfile.TemporaryDirectory(prefix="jitloader-files-")
os.environ["JITLOADER_DATA_DIR"] = _files.name  # downloads, never those of the user
if "JITLOADER_CACHE_DIR" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="jitloader-tests-")
    os.environ["JITLOADER_CACHE_DIR"] = _folder.name
