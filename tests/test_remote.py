"""Files behind URLs: fetched once by several threads and processes, whatever the server, the disk or a kill does."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jitloader as jl
from jitloader import storage
from jitloader.errors import DataError
from jitloader.storage import download, remote

STEP = 1 << 16  # bytes of a range in these tests
ROWS = np.random.default_rng(0).integers(0, 256, (1000, 700), np.uint8)  # 11 ranges
QUICK = f"""
from jitloader.storage import download, remote
download.RANGE, download.PAUSE, remote.TIMEOUT = {STEP}, 0.01, 5.0
"""
fsspec_only = pytest.mark.skipif(find_spec("fsspec") is None, reason="fsspec is not installed")


@functools.lru_cache(16)
def etag(whole: bytes) -> str:
    """A strong ETag."""
    return f'"{hashlib.sha1(whole).hexdigest()}"'


class Server:
    """Files by path, served with ranges, ETags and the faults that a test asks for; counts the bytes that it sent."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.ranges = self.marks = True
        self.fault: Callable[[Any, int, bytes], bytes | None] = lambda request, number, body: body
        self.sent: list[tuple[int, int]] = []  # of requests for more than the first byte
        self.requests = 0
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):
                    server.answer(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one GET as a server of files does."""
        request.close_connection = True
        whole = self.files.get(request.path)
        if whole is None:
            request.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked and self.ranges else (0, len(whole))
        body = whole[start:stop]
        number = 0
        if stop - start > 1:
            with self.lock:
                self.requests += 1
                number = self.requests
        changed = self.fault(request, number, body) if number else body
        if changed is None:
            return
        request.send_response(206 if asked and self.ranges else 200)
        request.send_header("Content-Length", str(len(body)))
        if asked and self.ranges:
            request.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(whole)}")
        if self.marks:
            request.send_header("ETag", etag(whole))
        for name, value in self.headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(changed)
        if number:
            with self.lock:
                self.sent.append((start, start + len(changed)))

    def put(self, name: str, array: np.ndarray) -> str:
        """Serve an array as a .npy, and give its URL."""
        self.files[f"/{name}"] = npy(array)
        return f"{self.url}/{name}"

    @property
    def total(self) -> int:
        """Bytes sent, probes aside."""
        return sum(stop - start for start, stop in self.sent)

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def npy(array: np.ndarray) -> bytes:
    """An array as the bytes of a .npy."""
    import io

    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


SIZE = len(npy(ROWS))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, small ranges and short pauses."""
    folder = tmp_path / "files"
    monkeypatch.setenv("JITLOADER_DATA_DIR", str(folder))
    monkeypatch.delenv("JITLOADER_DATA_LIMIT", raising=False)
    monkeypatch.setattr(download, "RANGE", STEP)
    monkeypatch.setattr(download, "PAUSE", 0.01)
    monkeypatch.setattr(remote, "TIMEOUT", 0.5)
    return folder


def files(folder: Path) -> list[str]:
    """The files of a cache that are whole."""
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program in another process, with small ranges."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", QUICK + code, *arguments], stdout=pipe, stderr=pipe, text=True, env=env
    )


OPEN = """
import sys, hashlib
from jitloader import storage
print(hashlib.sha256(storage.open_array(sys.argv[1]).tobytes()).hexdigest())
"""
DIGEST = hashlib.sha256(ROWS.tobytes()).hexdigest()


# -- what is right ----------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_once(server: Server, cache: Path) -> None:
    """The bytes of a URL, in ranges, each once; the second time there is one small request."""
    url = server.put("rows.npy", ROWS)

    for _ in range(2):
        data = jl.open(url)
        assert data.fields == ("rows",)
        assert np.array_equal(data[:].rows, ROWS)
    field = jl.Dataset(image=url)

    assert np.array_equal(field[5].image, ROWS[5])
    assert sorted(server.sent) == [(at, min(at + STEP, SIZE)) for at in range(0, SIZE, STEP)]
    assert files(cache) == ["rows.npy"]
    assert storage.mapping(field.sources["image"].parts[0].array) is not None  # mapped, not read
    assert np.array_equal(pickle.loads(pickle.dumps(data))[3].rows, ROWS[3])
    data.verify()


def test_a_new_version_is_fetched(server: Server) -> None:
    """Where the ETag is another the file is fetched anew; maps of the old version keep its bytes."""
    url = server.put("rows.npy", ROWS)
    before = jl.open(url)
    server.put("rows.npy", ROWS[::-1])

    assert np.array_equal(storage.open_array(url), ROWS[::-1])
    assert np.array_equal(before[:].rows, ROWS)
    before.verify()


def test_formats_behind_urls(server: Server, tmp_path: Path) -> None:
    """Any format that a path may have: found by content, whatever is behind the question mark."""
    np.savez(tmp_path / "pair.npz", x=np.arange(6).reshape(3, 2), y=np.arange(3.0))
    server.files["/pair.npz?token=a/b.c"] = (tmp_path / "pair.npz").read_bytes()

    data = jl.open(f"{server.url}/pair.npz?token=a/b.c")

    assert data[2].x.tolist() == [4, 5] and data[2].y == 2.0


def test_folders_behind_http(server: Server, tmp_path: Path) -> None:
    """A folder that was saved opens by its manifest; what does not fit it is an error, and so is a folder without."""
    rows = ({"x": i, "y": ROWS[i], "t": range(i)} for i in range(10))
    jl.write(tmp_path / "saved", rows, x="int64", t=("int64", (None,)))
    for file in (tmp_path / "saved").iterdir():
        server.files[f"/data/{file.name}"] = file.read_bytes()

    data = jl.open(f"{server.url}/data/")
    assert data.fields == ("x", "y", "t") and np.array_equal(data[9].y, ROWS[9]) and data[3].t.tolist() == [0, 1, 2]
    assert jl.open(f"{server.url}/data", fields=["t"])[2].t.tolist() == [0, 1]
    assert jl.open(f"{server.url}/data", fields=["x"]).fields == ("x",)

    server.put("data/x.npy", np.arange(11))
    with pytest.raises(DataError, match=rf"^{server.url}/data/x.npy: int64 \(11,\) found, '<i8' \[10\] expected"):
        jl.open(f"{server.url}/data/")
    told = rf"the server says 404 .* for its manifest\.json: http lists no folders.*: '{server.url}/nothing/'$"
    with pytest.raises(FileNotFoundError, match=told):
        jl.open(f"{server.url}/nothing/")


def test_errors_of_urls_that_lead_nowhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number and one reason each: a server that is not there, by http and by fsspec, and a file:// of another machine."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for kind in ("http", "ftp"):
        if kind == "ftp":
            pytest.importorskip("fsspec")
        with pytest.raises(
            ConnectionAbortedError, match=rf"^\[Errno \d+\] not reached: [^\[]*: '{kind}://127.0.0.1:{port}/x.npy'$"
        ):
            jl.open(f"{kind}://127.0.0.1:{port}/x.npy")
    with pytest.raises(DataError, match=r"^file://nope/x\.npy: the host 'nope' found: file:///path expected"):
        jl.open("file://nope/x.npy")


def test_file_urls_are_mapped_in_place(tmp_path: Path, cache: Path) -> None:
    """A file:// URL is the path: nothing is copied, and fsspec is not needed."""
    path = tmp_path / "a b.npy"
    np.save(path, ROWS)

    for url in (path.as_uri(), f"file://{path}"):
        found = storage.mapping(storage.open_array(url))
        assert found is not None and found.path == str(path)
    assert jl.open(tmp_path.as_uri()).fields == ("a b",)
    assert not cache.exists()


@fsspec_only
def test_memory_files_and_folders() -> None:
    """A file system of fsspec's: files, folders with and without a manifest, a change."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/d/x.npy", npy(ROWS))
    memory.pipe("/d/y.npy", npy(np.arange(1000)))

    data = jl.open("memory://d")
    assert data.fields == ("x", "y") and np.array_equal(data[:].x, ROWS)
    memory.pipe("/d/x.npy", npy(ROWS[::-1]))
    assert np.array_equal(storage.open_array("memory://d/x.npy"), ROWS[::-1])
    assert jl.open("memory://d", fields=["y"]).fields == ("y",)
    with pytest.raises(FileNotFoundError, match="no such file"):
        jl.open("memory://d/z.npy")
    with pytest.raises(DataError, match="field 'z' expected, x, y found"):
        jl.open("memory://d", fields=["z", "x", "y"])


@fsspec_only
def test_a_file_system_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file system raises, whatever it is, is tried again, and then an OSError that names the URL."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/d/x.npy", npy(ROWS))
    monkeypatch.setattr(download, "TRIES", 2)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("throttled")

    for name, told in (("cat_file", "stopped at 0 of"), ("info", "not reached"), ("ls", "not reached")):
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), name, fails)
            with pytest.raises(OSError, match=f"{told}.*RuntimeError: throttled.*memory://d"):
                jl.open("memory://d" if name == "ls" else "memory://d/x.npy")
    info, calls = type(memory).info, []
    monkeypatch.setattr(
        type(memory), "info", lambda *a, **k: (calls.append(1), fails() if len(calls) > 1 else 0)[0] or info(*a, **k)
    )
    with pytest.raises(OSError, match="RuntimeError: throttled.*memory://d/x.npy"):
        jl.open("memory://d/x.npy")


@fsspec_only
def test_a_change_in_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of two versions never make one file, where a file system has no way to ask for a version."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/x.npy", npy(ROWS))
    read, calls = type(memory).cat_file, []

    def changing(self: Any, path: str, **span: Any) -> Any:
        calls.append(path)
        if len(calls) == 4:
            memory.pipe("/x.npy", npy(ROWS[::-1]))
        return read(self, path, **span)

    monkeypatch.setattr(type(memory), "cat_file", changing)

    assert np.array_equal(storage.open_array("memory://x.npy"), ROWS[::-1])


def test_checksums(server: Server, cache: Path) -> None:
    """What the server gives as a checksum is compared: a wrong one is an error, and nothing is kept."""
    for k, (name, kind, form) in enumerate(
        [("Repr-Digest", "sha256", "sha-256=:{}:"), ("x-goog-hash", "md5", "crc32c=AAAAAA==, md5={}")]
    ):
        url = server.put("rows.npy", ROWS + np.uint8(k))
        body = server.files["/rows.npy"]
        right, wrong = (base64.b64encode(hashlib.new(kind, b).digest()).decode() for b in (body, b"other"))
        server.headers = {name: form.format(wrong)}
        with pytest.raises(DataError, match=rf"{kind} {hashlib.new(kind, b'other').hexdigest()} expected, .* found"):
            storage.open_array(url)
        assert files(cache) == []
        server.headers = {name: form.format(right)}
        assert np.array_equal(storage.open_array(url), ROWS + np.uint8(k))
        download.shutil.rmtree(cache)


# -- faults of the server ---------------------------------------------------------------------------------------------


def sometimes(number: int) -> bool:
    return number % 3 == 1


def cut(request: Any, number: int, body: bytes) -> bytes:
    """A connection that ends in the middle."""
    return body[: len(body) // 2] if sometimes(number) else body


def slow(request: Any, number: int, body: bytes) -> bytes:
    time.sleep(0.1)
    return body


def fails(request: Any, number: int, body: bytes) -> bytes | None:
    """Status 500, 503 or 429."""
    if not sometimes(number):
        return body
    request.send_error((500, 503, 429)[number // 3 % 3])
    return None


def resets(request: Any, number: int, body: bytes) -> bytes | None:
    """No answer at all."""
    return None if sometimes(number) else body


def stalls_once(request: Any, number: int, body: bytes) -> bytes | None:
    """Silence for longer than the timeout."""
    if number == 2:
        time.sleep(0.8)
        return None
    return body


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("fault", [cut, slow, fails, resets, stalls_once])
def test_passing_faults(server: Server, fault: Any, ranges: bool) -> None:
    """What another try mends is mended: the exact bytes, whether or not the server knows ranges."""
    url, server.fault, server.ranges = server.put("rows.npy", ROWS), fault, ranges

    assert np.array_equal(storage.open_array(url), ROWS)


def test_a_cut_range_goes_on_where_it_was(server: Server) -> None:
    """What came before a cut is not asked for again."""
    url, server.fault = server.put("rows.npy", ROWS), cut

    jl.open(url)

    assert server.total == SIZE


def always(change: Callable[[Any, bytes], bytes | None], after: int = 0) -> Any:
    return lambda request, number, body: change(request, body) if number > after else body


def stall(request: Any, body: bytes) -> None:
    time.sleep(0.8)


def trickle(request: Any, body: bytes) -> bytes:
    """A byte now and then, so that no single wait is long."""
    request.send_response(206)
    request.send_header("Content-Length", str(len(body)))
    start = int(request.headers["Range"].split("=")[1].split("-")[0])
    request.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{SIZE}")
    request.send_header("ETag", etag(npy(ROWS)))
    request.end_headers()
    for k in range(7):
        request.wfile.write(body[k : k + 1])
        request.wfile.flush()
        time.sleep(0.1)
    return b""


def wrong_length(request: Any, body: bytes) -> bytes:
    return body[:100]


def wrong_range(request: Any, body: bytes) -> None:
    request.send_response(206)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Content-Range", f"bytes 7-{6 + len(body)}/{SIZE}")
    request.send_header("ETag", etag(npy(ROWS)))
    request.end_headers()
    request.wfile.write(body)


def error500(request: Any, body: bytes) -> None:
    request.send_error(500)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (stall, "no answer in 0.5 s"),
        (trickle, r"\d+ bytes in 0.5 s|bytes expected, the answer ended"),
        (wrong_length, r"65536 bytes expected, the answer ended after \d+|bytes expected"),
        (wrong_range, r"bytes \d+ to \d+ asked for, 7 to \d+ came"),
        (error500, "the server says 500 Internal Server Error"),
    ],
)
def test_lasting_faults(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, change: Any, told: str) -> None:
    """What no try mends is an error in bounded time that names URL and bytes; the next run fetches only what is left."""
    monkeypatch.setattr(download, "TRIES", 2)
    monkeypatch.setattr(download, "THREADS", 1)
    url, server.fault = server.put("rows.npy", ROWS), always(change, after=3)
    start = time.monotonic()

    with pytest.raises(OSError, match=told) as raised:
        jl.open(url)

    assert time.monotonic() - start < 6
    assert raised.value.filename == url
    found = re.search(rf"stopped at (\d+) of {SIZE} bytes after 2 tries", str(raised.value))
    assert found and 3 * STEP <= int(found[1]) < 4 * STEP
    assert files(cache) == []
    server.fault, server.sent = always(lambda request, body: body), []
    assert np.array_equal(storage.open_array(url), ROWS)
    assert server.total == SIZE - 3 * STEP


def test_a_change_in_the_middle(server: Server, cache: Path) -> None:
    """Old and new bytes never mix: another ETag on a range starts the download over."""
    url = server.put("rows.npy", ROWS)
    new = np.ascontiguousarray(ROWS[::-1])

    def change(request: Any, number: int, body: bytes) -> bytes:
        if number == 5:
            server.put("rows.npy", new)
        return body

    server.fault = change

    assert np.array_equal(storage.open_array(url), new)
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_never_rests(server: Server) -> None:
    """A file that changes during each download is an error, not a loop."""
    url = server.put("rows.npy", ROWS)

    def change(request: Any, number: int, body: bytes) -> bytes:
        if number % 4 == 2:
            server.put("rows.npy", np.roll(ROWS, number))
        return body

    server.fault = change

    with pytest.raises(DataError, match="rows.npy: changed 4 times while it was downloaded"):
        jl.open(url)


def test_no_version_no_ranges(server: Server) -> None:
    """Where neither ETag nor time tells versions apart, all comes in one answer, and anew each time."""
    url, server.marks = server.put("rows.npy", ROWS), False

    assert np.array_equal(storage.open_array(url), ROWS)
    assert server.sent == [(0, SIZE)]
    server.put("rows.npy", ROWS[::-1])
    assert np.array_equal(storage.open_array(url), ROWS[::-1])


def test_refusals(server: Server) -> None:
    """What the server says of a missing or forbidden file, an empty one, and one of unknown length."""
    with pytest.raises(FileNotFoundError, match="the server says 404 Not Found") as missing:
        jl.Dataset(image=f"{server.url}/none.npy")
    assert missing.value.filename == f"{server.url}/none.npy" and "field 'image'" in str(missing.value)
    server.files["/empty.npy"] = b""
    server.ranges = False
    with pytest.raises(DataError, match="empty.npy: an empty file"):
        jl.open(f"{server.url}/empty.npy")
    server.files["/text.npy"] = b"<html>hello</html>"
    with pytest.raises(DataError, match=rf"^{server.url}/text.npy: "):
        jl.open(f"{server.url}/text.npy")
    with pytest.raises(TypeError, match="http takes headers alone, got 'anon'"):
        jl.open(f"{server.url}/text.npy", storage_options={"anon": True})
    with pytest.raises(DataError, match=r"abcd://x: .*abcd"):
        jl.open("abcd://x")


@pytest.mark.parametrize(
    ("status", "headers", "kind", "told"),
    [
        (404, {}, FileNotFoundError, "the server says 404"),
        (410, {}, FileNotFoundError, "the server says 410"),
        (401, {}, PermissionError, "the server says 401"),
        (403, {}, PermissionError, "the server says 403"),
        (400, {}, OSError, "the server says 400"),
        (416, {}, DataError, "an empty file"),
        (429, {}, OSError, "the server says 429"),
        (200, {}, DataError, "does not tell the length"),
        (200, {"Content-Length": "4", "Content-Encoding": "gzip"}, DataError, "does not tell the length"),
        (206, {"Content-Range": "bytes 0-0/*"}, DataError, "does not tell the length"),
        (206, {"Content-Range": "items 0-0/9"}, OSError, "Content-Range 'items 0-0/9'"),
        (206, {"Content-Range": "bytes 0-0/0"}, DataError, "an empty file"),
    ],
)
def test_answers_to_the_first_question(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int, headers: Any, kind: Any, told: str
) -> None:
    """Each status and head that names no file of known length is the error it stands for, with the URL."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(b"\0")

    monkeypatch.setattr(server, "answer", answer)
    monkeypatch.setattr(download, "TRIES", 2)
    with pytest.raises(kind, match=re.escape(told)) as raised:
        storage.open_array(f"{server.url}/x.npy")
    assert f"{server.url}/x.npy" in (str(raised.value) + str(getattr(raised.value, "filename", "")))


def test_ranges_that_end_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that shrank (416), whose ranges tell another length, or are announced shorter than they are, is asked for
    anew or again; in the end the bytes are exact."""
    url, seen = server.put("rows.npy", ROWS), []

    def fault(request: Any, number: int, body: bytes) -> bytes | None:
        seen.append(number)
        if number == 2:
            request.send_error(416)
            return None
        if number in (4, 6):
            request.send_response(206)
            whole, size = (SIZE, len(body) - 1) if number == 4 else (SIZE + 1, len(body))
            start = int(request.headers["Range"].split("=")[1].split("-")[0])
            request.send_header("Content-Length", str(size))
            request.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{whole}")
            request.send_header("ETag", etag(npy(ROWS)))
            request.end_headers()
            request.wfile.write(body[:size])
            return None
        return body

    server.fault = fault
    monkeypatch.setattr(download, "THREADS", 1)
    assert np.array_equal(storage.open_array(url), ROWS)
    assert max(seen) > 11


def test_digests_that_are_none(server: Server) -> None:
    """A checksum that is no base64 is as if the server had given none."""
    url = server.put("rows.npy", ROWS)
    server.headers = {"Repr-Digest": "sha-256=:AAA:"}
    assert np.array_equal(storage.open_array(url), ROWS)


def test_a_url_that_leads_to_a_folder(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends from a name to the folder of that name is followed: the folder's manifest is looked for."""
    plain = server.answer

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/folder":
            request.close_connection = True
            request.send_response(301)
            request.send_header("Location", "/folder/")
            request.end_headers()
        elif request.path == "/folder/":
            server.files["/folder/"] = b"<html>"
            plain(request)
        else:
            plain(request)

    monkeypatch.setattr(server, "answer", answer)
    with pytest.raises((OSError, DataError), match="folder"):
        jl.open(f"{server.url}/folder")
    jl.Dataset(x=np.arange(3)).save(tmp := Path(os.environ["JITLOADER_DATA_DIR"]).parent / "saved")
    for file in tmp.iterdir():
        if file.is_file():
            server.files[f"/folder/{file.name}"] = file.read_bytes()
    assert jl.open(f"{server.url}/folder")[:].x.tolist() == [0, 1, 2]


def test_headers_are_sent(server: Server) -> None:
    """Headers given, a token for instance, go with each request."""
    url, seen = server.put("rows.npy", ROWS), set()
    server.fault = lambda request, number, body: seen.add(request.headers.get("Authorization")) or body

    jl.open(url, storage_options={"headers": {"Authorization": "Bearer t"}})

    assert seen == {"Bearer t"}


def test_an_unreachable_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the server the copy serves, with a warning; without a copy the error says what was tried."""
    url = server.put("rows.npy", ROWS)
    jl.open(url)
    monkeypatch.setattr(remote, "_request", lambda *_: (_ for _ in ()).throw(remote.Interrupted("refused")))

    with pytest.warns(UserWarning, match=r"rows.npy: not reached \(refused\); the copy of \d{4}-\d\d-\d\d is used"):
        data = jl.open(url)

    assert np.array_equal(data[:].rows, ROWS)
    with pytest.raises(ConnectionError, match="not reached: refused"):
        jl.open(server.url + "/other.npy")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsspec a URL other than http says what to install."""
    monkeypatch.setitem(sys.modules, "fsspec.core", None)

    with pytest.raises(ImportError, match=r"opening a s3:// URL needs fsspec"):
        jl.open("s3://bucket/x.npy")


def test_a_missing_file_needs_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file:// URL of nothing is a missing file, with or without fsspec."""
    monkeypatch.setitem(sys.modules, "fsspec.core", None)

    with pytest.raises(FileNotFoundError, match=r"nope\.npy"):
        jl.open(f"file://{tmp_path}/nope.npy")


@pytest.mark.parametrize(
    "url, told",
    [
        ("http:///x.npy", "http:///x.npy: no host found in it"),
        ("http://127.0.0.1:99999/x.npy", "Port out of range 0-65535"),
        ("http://[::1/x.npy", "Invalid IPv6 URL"),
        ("http://user:secret@127.0.0.1:9/x.npy", "http://***@127.0.0.1:9/x.npy: a user in a URL is not sent; give storage_options"),
    ],
)
def test_urls_that_cannot_be_asked_for(url: str, told: str) -> None:
    """They are refused at once, with the URL and without a try."""
    start = time.monotonic()
    with pytest.raises(jl.DataError) as caught:
        jl.open(url)

    assert told in str(caught.value) and "secret" not in str(caught.value) and "x.npy" in str(caught.value)
    assert time.monotonic() - start < 0.5


# -- the cache --------------------------------------------------------------------------------------------------------


def test_processes_share_a_download(server: Server) -> None:
    """Of two processes that start at once each gets the bytes, and the server sends each byte once."""
    url, server.fault = server.put("rows.npy", ROWS), slow

    started = [run(OPEN, url) for _ in range(2)]
    ended = [process.communicate(timeout=60) for process in started]

    assert [out.strip() for out, _ in ended] == [DIGEST] * 2, (ended, [process.returncode for process in started])
    assert server.total == SIZE


def test_threads_share_a_download(server: Server) -> None:
    """So do threads of one process."""
    url, found = server.put("rows.npy", ROWS), []
    server.fault = slow
    threads = [threading.Thread(target=lambda: found.append(jl.open(url)[:].rows)) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 4 and all(np.array_equal(rows, ROWS) for rows in found)
    assert server.total == SIZE


@pytest.mark.parametrize("finished", [1, 9])
def test_a_killed_download_goes_on(server: Server, cache: Path, finished: int) -> None:
    """kill -9 in the middle: the next process asks for what is missing alone, and ends with the exact bytes."""
    url, reached = server.put("rows.npy", ROWS), threading.Event()
    gate = threading.Event()

    def hold(request: Any, number: int, body: bytes) -> bytes | None:
        journals = [path.read_bytes() for path in cache.glob("*/.journal")]
        if journals and journals[0].count(b"\n") > finished:  # one is before its lines
            reached.set()
            gate.wait(60)
            return None
        return body

    server.fault = hold
    process = run("download.THREADS = 1\n" + OPEN, url)
    assert reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gate.set()
    server.fault, server.sent = always(lambda request, body: body), []

    assert np.array_equal(storage.open_array(url), ROWS)
    assert server.total == SIZE - finished * STEP


def test_a_damaged_part_is_fetched_again(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range counts as done only where its bytes have the sum of the journal; cut and foreign lines count for nothing."""
    monkeypatch.setattr(download, "THREADS", 1)
    monkeypatch.setattr(download, "TRIES", 1)
    url, server.fault = server.put("rows.npy", ROWS), always(error500, after=4)
    with pytest.raises(OSError, match="500"):
        jl.open(url)
    (entry,) = cache.iterdir()
    with open(entry / ".part", "r+b") as part:  # as a disk does that loses power before it wrote
        part.seek(STEP)
        part.write(bytes(100))
    with open(entry / ".journal", "ab") as journal:
        journal.write(b"65536 131072 00000000\nnonsense\n393216 4587")
    server.fault, server.sent = always(lambda request, body: body), []

    assert np.array_equal(storage.open_array(url), ROWS)
    assert server.total == SIZE - 3 * STEP and (STEP, 2 * STEP) in server.sent


def test_the_least_recently_used_goes(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit entries go in the order of their last use, and a removed file stays under its map."""
    monkeypatch.setenv("JITLOADER_DATA_LIMIT", str(int(3.5 * SIZE)))
    maps = {name: jl.open(server.put(f"{name}.npy", ROWS + k)) for k, name in enumerate("abc")}
    for name in "bac":  # the order of use from now on
        time.sleep(0.02)
        jl.open(f"{server.url}/{name}.npy")
    time.sleep(0.02)

    maps["d"] = jl.open(server.put("d.npy", ROWS + 3))
    assert files(cache) == ["a.npy", "c.npy", "d.npy"]
    maps["e"] = jl.open(server.put("e.npy", ROWS + 4))
    assert files(cache) == ["c.npy", "d.npy", "e.npy"]

    for k, data in enumerate(maps.values()):
        assert np.array_equal(data[:][0], ROWS + np.uint8(k))
        data.verify()
    assert server.total == 5 * SIZE
    jl.open(f"{server.url}/b.npy")
    assert server.total == 6 * SIZE


def test_a_file_over_the_limit(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot fit is an error before a byte of it is fetched, and before anything is removed for it."""
    jl.open(server.put("small.npy", ROWS[:100]))
    server.sent.clear()
    monkeypatch.setenv("JITLOADER_DATA_LIMIT", "500e3")
    url = server.put("rows.npy", ROWS)

    with pytest.raises(OSError, match=rf"{SIZE} bytes, more than the cache's limit of 500000") as raised:
        jl.open(url)

    assert raised.value.errno == errno.ENOSPC and server.sent == []
    assert files(cache) == ["small.npy"]
    monkeypatch.setenv("JITLOADER_DATA_LIMIT", "-1")
    with pytest.raises(ValueError, match="JITLOADER_DATA_LIMIT must be a number of bytes, as 5e10, got '-1'"):
        jl.open(server.url + "/rows.npy")
    monkeypatch.setenv("JITLOADER_DATA_LIMIT", "much")
    with pytest.raises(ValueError, match="JITLOADER_DATA_LIMIT must be a number of bytes"):
        jl.open(url)


def test_a_full_disk(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room is an error at once that names URL and bytes; when there is room the next try gets it all."""
    url = server.put("rows.npy", ROWS)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=rf"{SIZE} bytes: No space left on device") as raised:
            jl.open(url)
    with monkeypatch.context() as patch:
        patch.setattr(download, "_write", full)
        with pytest.raises(OSError, match="No space left on device"):
            jl.open(url)

    assert raised.value.filename == url and files(cache) == []
    assert np.array_equal(storage.open_array(url), ROWS)


def test_names_stay_inside_the_cache(server: Server, cache: Path) -> None:
    """The name of a file comes from the URL, and cannot lead out of its folder."""
    for path in ("/..%2f..%2fevil.npy", "/.part", "/%00.npy", "/" + "x" * 300 + ".npy"):
        server.files[path] = npy(ROWS[:3])
        near = download.fetch(server.url + path)
        assert Path(near).parent.parent == cache and not Path(near).name.startswith(".")
        assert Path(near).read_bytes() == npy(ROWS[:3])


def test_save_takes_no_url(tmp_path: Path) -> None:
    """Writing goes to a local folder."""
    with pytest.raises(ValueError, match="s3://bucket/x: a local folder expected"):
        jl.Dataset(x=np.arange(3)).save("s3://bucket/x")


# -- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A bucket of a local S3 server, with the keys of nobody."""
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of boto's own
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        s3 = moto.ThreadedMotoServer(port=0, verbose=False)
        s3.start()
        options = {"endpoint_url": "http://{}:{}".format(*s3.get_host_and_port())}
        filesystem = s3fs.S3FileSystem(**options)
        filesystem.mkdir("bucket")
        yield filesystem, options
        s3.stop()


@pytest.mark.filterwarnings("ignore")
def test_s3(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one part and of several, folders with and without a manifest, a change, and what is missing."""
    filesystem, options = bucket
    filesystem.pipe("bucket/d/x.npy", npy(ROWS))
    filesystem.pipe("bucket/d/y.npy", npy(np.arange(1000)))

    data = jl.open("s3://bucket/d", storage_options=options)
    assert data.fields == ("x", "y") and np.array_equal(data[:].x, ROWS)
    digest = remote.probe("s3://bucket/d/x.npy", options).digest
    assert digest == ("md5", hashlib.md5(npy(ROWS)).hexdigest())

    filesystem.pipe("bucket/d/x.npy", npy(ROWS[::-1]))
    assert np.array_equal(storage.open_fields("s3://bucket/d/x.npy", options=options)["x"], ROWS[::-1])
    large = np.arange(1_500_000)
    filesystem.pipe("bucket/large.npy", npy(large), chunksize=5 << 20)
    monkeypatch.setattr(download, "RANGE", 4 << 20)
    assert np.array_equal(storage.open_fields("s3://bucket/large.npy", options=options)["large"], large)
    with pytest.raises(FileNotFoundError):
        jl.open("s3://bucket/none.npy", storage_options=options)


@pytest.mark.filterwarnings("ignore")
def test_s3_checksum(bucket: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong byte from S3 is found by the ETag, unless the object is one whose ETag is no MD5."""
    filesystem, options = bucket
    filesystem.pipe("bucket/x.npy", npy(ROWS))
    read, head = filesystem.cat_file, filesystem.call_s3
    wrong = npy(ROWS)[:STEP] + b"\xff" + npy(ROWS)[STEP + 1 :]

    def other(path: str, start: int, end: int) -> bytes:
        return b"\xff" + read(path, start=start, end=end)[1:] if start == STEP else read(path, start=start, end=end)

    monkeypatch.setattr(filesystem, "cat_file", other)
    with pytest.raises(DataError, match="s3://bucket/x.npy: md5 [0-9a-f]{32} expected"):
        storage.open_fields("s3://bucket/x.npy", options=options)
    assert files(cache) == []
    kms = {"ServerSideEncryption": "aws:kms"}
    monkeypatch.setattr(filesystem, "call_s3", lambda *call, **names: {**head(*call, **names), **kms})
    near = download.fetch("s3://bucket/x.npy", options)
    assert Path(near).read_bytes() == wrong
