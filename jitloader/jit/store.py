"""The cache folder: compiled kernels and inferred types, written whole or not at all, and private to the user."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORMAT = 1  # of the cache files


MAGIC = b"jitloader-kernel\n"


def cache_folder() -> Path | None:
    """Give the folder for compiled kernels, made private to the user, or None where no folder can be had.

    The first that can be written: `JITLOADER_CACHE_DIR`, `NUMBA_CACHE_DIR`, the user's cache folder, a temporary one.
    """
    uid = os.getuid() if hasattr(os, "getuid") else ""
    named = os.environ.get("JITLOADER_CACHE_DIR")
    choices = [named] if named else []
    if os.environ.get("NUMBA_CACHE_DIR"):
        choices.append(os.path.join(os.environ["NUMBA_CACHE_DIR"], "jitloader"))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    choices += [os.path.join(base, "jitloader"), os.path.join(tempfile.gettempdir(), f"jitloader-{uid}")]
    for choice in choices:
        if not os.path.isabs(choice) and choice != named:
            continue  # "~" stayed as it was: no home
        if _private(Path(choice)):
            return Path(choice)
    return None


_probed: dict[Path, bool] = {}


def _private(folder: Path) -> bool:
    """Whether a folder can be written by this user and by nobody else: machine code is loaded from it."""
    if folder not in _probed:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            safe = os.name == "nt" or not status.st_mode & 0o022
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
            _probed[folder] = ours and safe
        except OSError:
            _probed[folder] = False
    return _probed[folder]


def clear_cache() -> int:
    """Remove all compiled kernels, remembered types and unpacked files from the cache folder; give the number of the first two."""
    folder = cache_folder()
    files = [*folder.glob("*.kernel"), *folder.glob("*.type")] if folder else []
    if folder:
        _tidy(folder)
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
    if folder:
        shutil.rmtree(folder / "unpacked", ignore_errors=True)
    return len(files)


def write(file: Path, meta: dict[str, Any], payload: bytes) -> None:
    """Write a cache file whole or not at all; a full disk costs the cache, not the run."""
    head = json.dumps(meta).encode()
    body = struct.pack("<I", len(head)) + head + payload
    with contextlib.suppress(OSError):
        _tidy(file.parent)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


def _tidy(folder: Path) -> None:
    """Remove what writers that were killed have left: no write takes an hour."""
    for part in folder.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > 3600:
                part.unlink()


def read(file: Path) -> tuple[dict[str, Any], bytes] | None:
    """Read a cache file, or give None where it is missing, cut or altered."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + 32
    if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(raw[start:]).digest() != raw[len(MAGIC) : start]:
        return None
    (size,) = struct.unpack_from("<I", raw, start)
    return json.loads(raw[start + 4 : start + 4 + size]), raw[start + 4 + size :]


def platform() -> str:
    """Name all that compiled code depends on besides the function."""
    global _platform_text
    if not _platform_text:
        import importlib.metadata  # 12 ms of every import of ours, were it at the top

        import llvmlite.binding as llvm

        packages = [f"{p}={importlib.metadata.version(p)}" for p in ("numba", "llvmlite", "numpy")]
        cpu = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), llvm.get_process_triple()]
        _platform_text = "|".join([str(FORMAT), sys.version, *packages, *cpu])
    return _platform_text


_platform_text = ""
