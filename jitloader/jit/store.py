"""The cache folder: compiled kernels and inferred types, written whole or not at all, and private to the user.

Modules that few calls need are imported by these: tempfile and shutil take 5 ms, hashlib 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import sys
import threading
import time
import warnings
from typing import Any

from .refuse import outside

FORMAT = 1  # of the cache files


MAGIC = b"jitloader-kernel\n"
_OURS = re.compile(r"[0-9a-f]{40}\.(kernel|type)")
_UNPACKED = re.compile(r".+-[0-9a-f]{16}", re.DOTALL)


def cache_folder() -> str | None:
    """Give the folder for compiled kernels, made private to the user, or None where no folder can be had.

    The first that this user alone can write: `JITLOADER_CACHE_DIR`, `NUMBA_CACHE_DIR`, the user's cache folder, a
    temporary one. A UserWarning tells, once, that the first is passed over.
    """
    named = os.environ.get("JITLOADER_CACHE_DIR")
    if not named:
        return _other_folder()
    named = _named.setdefault(named, os.path.abspath(os.path.expanduser(named)))  # wherever the process goes later
    known = named in _probed
    if _private(named):
        return named
    other = _other_folder()
    if not known:
        place = f"kernels are kept in {other}" if other else "no kernels are kept"
        _, level = outside()
        warnings.warn(f"JITLOADER_CACHE_DIR: {named} is no folder that you alone can write; {place}", stacklevel=level)
    return other


def _other_folder() -> str | None:
    uid = os.getuid() if hasattr(os, "getuid") else ""
    choices = []
    if os.environ.get("NUMBA_CACHE_DIR"):
        choices.append(os.path.join(os.environ["NUMBA_CACHE_DIR"], "jitloader"))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    choices.append(os.path.join(base, "jitloader"))
    for choice in choices:
        if os.path.isabs(choice) and _private(choice):  # else "~" stayed as it was: no home
            return choice
    import tempfile

    last = os.path.join(tempfile.gettempdir(), f"jitloader-{uid}")
    return last if _private(last) else None


_probed: dict[str, bool] = {}
_named: dict[str, str] = {}  # what JITLOADER_CACHE_DIR said, and the path that meant when it was first asked for


def _private(folder: str) -> bool:
    """Whether a folder can be written by this user and by nobody else: machine code is loaded from it."""
    if folder not in _probed or (_probed[folder] and not os.path.isdir(folder)):
        try:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)
            status = os.stat(folder)
            ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            safe = os.name == "nt" or not status.st_mode & 0o022
            handle, name = _part(folder)
            os.close(handle)
            os.unlink(name)
            _probed[folder] = ours and safe
        except OSError:
            _probed[folder] = False
    return _probed[folder]


def clear_cache() -> int:
    """Remove all compiled kernels, remembered types and unpacked files from the cache folder; give the number of the first two."""
    folder = cache_folder()
    if folder is None:
        return 0
    import shutil

    _tidy(folder)
    files = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
    for name in files:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    unpacked = os.path.join(folder, "unpacked")
    with contextlib.suppress(OSError):
        for name in os.listdir(unpacked):
            if _UNPACKED.fullmatch(name):
                shutil.rmtree(os.path.join(unpacked, name), ignore_errors=True)
        os.rmdir(unpacked)
    return len(files)


def _part(folder: str) -> tuple[int, str]:
    """Make a new, empty file of the user's own: its handle and its path."""
    path = os.path.join(folder, f"{os.getpid()}-{threading.get_ident()}-{time.time_ns()}.part")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600), path


def write(file: str, meta: dict[str, Any], payload: bytes) -> None:
    """Write a cache file whole or not at all; a full disk costs the cache, not the run."""
    head = json.dumps(meta).encode()
    body = struct.pack("<I", len(head)) + head + payload
    with contextlib.suppress(OSError):
        _tidy(os.path.dirname(file))
        handle, name = _part(os.path.dirname(file))
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(MAGIC + _digest(body) + body)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


def _digest(body: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(body).digest()


def _tidy(folder: str) -> None:
    """Remove what writers that were killed have left: no write takes an hour."""
    for name in os.listdir(folder):
        part = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if name.endswith(".part") and time.time() - os.stat(part).st_mtime > 3600:
                os.unlink(part)


def read(file: str) -> tuple[dict[str, Any], bytes] | None:
    """Read a cache file, or give None where it is missing, cut or altered."""
    try:
        with open(file, "rb") as f:
            raw = f.read()
    except OSError:
        return None
    start = len(MAGIC) + 32
    if raw[: len(MAGIC)] != MAGIC or _digest(raw[start:]) != raw[len(MAGIC) : start]:
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
