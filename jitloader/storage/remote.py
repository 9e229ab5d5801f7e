"""Files behind a URL: what one is now (size, version, checksum), and its bytes from here to there.

http and https are read by the standard library, everything else (s3, gs, memory, ...) by fsspec, where it is installed.
A `Remote` is one version of a file: bytes of another version are never handed out as its own.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jitloader.errors import DataError

from .mapped import Path, need

if TYPE_CHECKING:
    import urllib.error

TIMEOUT = 30.0  # seconds without a byte, or at less than SLOWEST, after which a connection is given up
SLOWEST = 1024  # bytes a second
CHUNK = 1 << 18
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(://|::)")
_HEX = re.compile(r'"?([0-9a-f]{32})"?')
_HIDDEN = re.compile(r"(?<=://)[^/@]*@")


class Changed(Exception):
    """The file is another version now."""


class Interrupted(Exception):
    """Bytes stopped coming, for a reason that another try may not meet."""


class Remote(NamedTuple):
    """One version of a file behind a URL.

    `mark` is what tells the version from others ("" where the server says nothing), `digest` a checksum (algorithm of
    hashlib, hex) or None. `read(start, stop)` gives the bytes in pieces, and may end early; without `ranges` it gives
    all, whatever is asked. It raises Changed, Interrupted, or an OSError that no other try mends. `confirm()` raises
    Changed where the version is no longer the same; None where `read` sees that by itself. `doubt()` says whether the
    digest may be of something else than the bytes.
    """

    url: str
    size: int
    mark: str
    ranges: bool
    digest: tuple[str, str] | None
    read: Callable[[int, int], Iterator[bytes]]
    confirm: Callable[[], None] | None = None
    doubt: Callable[[], bool] | None = None
    folder: bool = False


def scheme(path: Path) -> str:
    """Give the scheme of a URL, "" for a path."""
    found = _SCHEME.match(path) if isinstance(path, str) else None
    return found[1].lower() if found else ""


def local_path(url: str) -> str | None:
    """Give the path that a file:// URL stands for, or None for another one; DataError where it names another machine."""
    kind, _, path = url.partition("://")
    if kind.lower() not in ("file", "local"):
        return None
    path = path.removeprefix("localhost")
    if not path.startswith("/"):
        raise DataError(f"{url}: the host {path.partition('/')[0]!r} found: file:///path expected, with three slashes")
    import urllib.parse

    return urllib.parse.unquote(path)


def probe(url: str, options: Mapping[str, Any] | None = None) -> Remote:
    """Ask what a file is now, with one small request.

    `options` are fsspec's storage options; for http(s) `headers` alone. Raises FileNotFoundError or PermissionError
    where the server says so, Interrupted where it does not answer, DataError for an unknown scheme and for a file whose
    length it does not tell, ImportError naming what to install.
    """
    return (_http if scheme(url) in ("http", "https") else _filesystem)(url, dict(options or {}))


def listing(url: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Give the URLs of the .npy files in a folder, of a scheme that can list."""
    filesystem, path = _open_filesystem(url, dict(options or {}))
    with _translated(url):
        found = [entry["name"] for entry in filesystem.ls(path, detail=True) if entry["type"] == "file"]
    names = sorted(name.rstrip("/").rpartition("/")[2] for name in found)
    return [join(url, name) for name in names if name.endswith(".npy") and not name.startswith(".")]


def join(url: str, name: str) -> str:
    """Give the URL of a file in a folder."""
    link, sep, rest = url.partition("::")
    if scheme(url) in ("http", "https"):
        import urllib.parse

        parts = urllib.parse.urlsplit(url)
        return parts._replace(path=parts.path.rstrip("/") + "/" + urllib.parse.quote(name)).geturl()
    return link.rstrip("/") + "/" + name + sep + rest


def shown(url: str) -> str:
    """Give a URL for a message: without the password that it may hold."""
    return _HIDDEN.sub("***@", url)


# -- http -------------------------------------------------------------------------------------------------------------


def _http(url: str, options: dict[str, Any]) -> Remote:
    import urllib.error  # these and what follows take 25 ms, which paths need not wait for
    import urllib.parse

    headers = dict(options.pop("headers", {}))
    if options:
        raise TypeError(f"storage_options: http takes headers alone, got {', '.join(map(repr, options))}")
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port  # to read the port checks it
    except ValueError as error:
        raise DataError(f"{shown(url)}: {error}") from None
    if not host:
        raise DataError(f"{shown(url)}: no host found in it")
    if parts.username is not None:
        raise DataError(f"{shown(url)}: a user in a URL is not sent; give storage_options={{'headers': {{'Authorization': ...}}}}")
    if parts.path.endswith("/"):
        return Remote(url, 0, "", False, None, _nothing, folder=True)
    empty = f"{shown(url)}: an empty file: data expected, 0 bytes found"
    try:
        with _request(url, headers, 0, 1) as response:
            told, status, final = response.headers, response.status, response.geturl()
    except urllib.error.HTTPError as error:
        if error.code == 416:
            error.close()
            raise DataError(empty) from None
        raise _refusal(error, url) from None
    total = _total(told) if status == 206 else _number(told.get("Content-Length"))
    if final.partition("?")[0].endswith("/"):
        return Remote(url, 0, "", False, None, _nothing, folder=True)
    if total is None or told.get("Content-Encoding", "identity") != "identity":
        raise DataError(f"{shown(url)}: the server does not tell the length of the file, so it cannot be checked")
    if total == 0:
        raise DataError(empty)
    mark = _mark(told)

    def read(start: int, stop: int) -> Iterator[bytes]:
        """Ask for a range and hand out what comes, as far as it is of this version."""
        try:
            with _request(url, headers, *((start, stop) if status == 206 else (None, None))) as response:
                if _mark(response.headers) != mark or response.status != status:
                    raise Changed if _mark(response.headers) != mark else Interrupted(f"status {response.status}")
                begin, end, whole = _content_range(response.headers) if status == 206 else (0, total, total)
                if whole not in (None, total):
                    raise Changed
                if begin != start or end > stop:
                    raise Interrupted(f"bytes {start} to {stop} asked for, {begin} to {end} came")
                size = _number(response.headers.get("Content-Length"))
                if size is not None and size != end - begin:
                    raise Interrupted(f"{end - begin} bytes expected, {size} announced")
                yield from _pieces(response)
        except urllib.error.HTTPError as error:
            if error.code == 416:
                error.close()
                raise Changed from None
            raise _refusal(error, url) from None

    return Remote(url, total, mark, status == 206, _http_digest(told, status), read)


def _nothing(start: int, stop: int) -> Iterator[bytes]:
    return iter(())


def _request(url: str, headers: Mapping[str, str], start: int | None, stop: int | None) -> Any:
    """Send one GET, by an opener of our own: the process may have installed another."""
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    quoted = urllib.parse.quote(url, safe="%/:=&?~#+!$,;'@()*[]")
    request = urllib.request.Request(quoted, headers={"User-Agent": "jitloader"})
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # a token is for this server alone
    if start is not None and stop is not None:
        request.add_header("Range", f"bytes={start}-{stop - 1}")
    try:
        return urllib.request.build_opener().open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        raise Interrupted(_told(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(_told(error)) from None


def _pieces(response: Any) -> Iterator[bytes]:
    """What a response holds, as it comes; a connection that trickles is given up like one that stands still."""
    import http.client

    since, count = time.monotonic(), 0
    while True:
        try:
            piece = response.read1(CHUNK)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Interrupted(_told(error)) from None
        if not piece:
            return
        yield piece
        count += len(piece)
        if time.monotonic() - since > TIMEOUT:
            if count < SLOWEST * TIMEOUT:
                raise Interrupted(f"{count} bytes in {TIMEOUT:g} s")
            since, count = time.monotonic(), 0


def _told(error: Any) -> str:
    """A reason in words."""
    if isinstance(error, TimeoutError):
        return f"no answer in {TIMEOUT:g} s"
    if isinstance(error, OSError) and error.strerror:  # without the number, for the error that tells it has one too
        return error.strerror
    return f"{error}" if isinstance(error, str) else f"{type(error).__name__}: {error}".rstrip(": ")


def _refusal(error: urllib.error.HTTPError, url: str) -> Exception:
    """The error that a status stands for: one that stays, or one that another try may not meet."""
    said = f"the server says {error.code} {error.reason}"
    error.close()
    if error.code in (404, 410):
        return FileNotFoundError(errno.ENOENT, said, shown(url))
    if error.code in (401, 403, 407):
        return PermissionError(errno.EACCES, said, shown(url))
    if error.code in (408, 425, 429) or error.code >= 500:
        return Interrupted(said)
    return OSError(errno.EIO, said, shown(url))


def _mark(headers: Any) -> str:
    """The version: the ETag, else the time of change (servers that share a name may differ in either alone)."""
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _content_range(headers: Any) -> tuple[int, int, int | None]:
    """First byte, the one after the last, and the whole length, of a part of a file."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", "").strip())
    if found is None:
        raise Interrupted(f"Content-Range {headers.get('Content-Range', '')!r:.60}")
    return int(found[1]), int(found[2]) + 1, _number(found[3])


def _total(headers: Any) -> int | None:
    return _content_range(headers)[2]


def _http_digest(headers: Any, status: int) -> tuple[str, str] | None:
    """A checksum of the whole file, where the server gives one that is known to be that."""
    found = re.search(r"sha-256=:([A-Za-z0-9+/=]+):", headers.get("Repr-Digest", ""))
    if found:
        return _decoded("sha256", found[1])
    for value in headers.get_all("x-goog-hash", []):
        found = re.search(r"md5=([A-Za-z0-9+/=]+)", value)
        if found:
            return _decoded("md5", found[1])
    if status == 200 and "Content-MD5" in headers:
        return _decoded("md5", headers["Content-MD5"])
    # S3's ETag of an object in one piece is its MD5, unless a key of KMS or of the user encrypts it.
    found = _HEX.fullmatch(headers.get("ETag", ""))
    coded = headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
        name.lower().startswith("x-amz-server-side-encryption-customer") for name in headers
    )
    return ("md5", found[1]) if found and "x-amz-request-id" in headers and not coded else None


def _decoded(kind: str, text: str) -> tuple[str, str] | None:
    import base64

    try:
        return kind, base64.b64decode(text.strip(), validate=True).hex()
    except binascii.Error:
        return None


# -- fsspec -----------------------------------------------------------------------------------------------------------


def _open_filesystem(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    fsspec = need("fsspec.core", "cloud", f"opening a {scheme(url)}:// URL")
    try:
        return fsspec.url_to_fs(url, **options)  # type: ignore[no-any-return]
    except ValueError as error:
        raise DataError(f"{shown(url)}: {error}") from None
    except ImportError as error:  # of a package of that scheme
        raise ImportError(f"{scheme(url)}:// URLs: {error}") from None
    except TypeError as error:
        raise TypeError(f"{shown(url)}: storage_options do not fit: {error}") from None
    except OSError as error:  # ftp, say, connects at once
        raise Interrupted(_told(error)) from None


def _filesystem(url: str, options: dict[str, Any]) -> Remote:
    filesystem, path = _open_filesystem(url, options)

    def ask() -> dict[str, Any]:
        with _translated(url):
            filesystem.invalidate_cache()
            found: dict[str, Any] = filesystem.info(path)
            if found["type"] == "file" and not _version(found):
                with contextlib.suppress(NotImplementedError, AttributeError):
                    found = {**found, "mtime": filesystem.modified(path)}
            return found

    def confirm() -> None:
        if (now := ask())["size"] != told["size"] or _version(now) != mark:
            raise Changed

    def read(start: int, stop: int) -> Iterator[bytes]:
        with _translated(url):
            yield filesystem.cat_file(path, start=start, end=stop)

    def doubt() -> bool:
        """Whether S3 encrypts by a key of KMS or of the user: then an ETag is no MD5 of the bytes."""
        bucket, _, key = path.partition("/")
        with contextlib.suppress(Exception):
            head = filesystem.call_s3("head_object", Bucket=bucket, Key=key)
            return head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
        return True

    told = ask()
    if told["type"] == "directory":
        return Remote(url, 0, "", False, None, _nothing, folder=True)
    size, mark = told.get("size"), _version(told)
    if size is None:
        raise DataError(f"{shown(url)}: {scheme(url)} does not tell the length of the file, so it cannot be checked")
    if size == 0:
        raise DataError(f"{shown(url)}: an empty file: data expected, 0 bytes found")
    digest = _decoded("md5", told["md5Hash"]) if isinstance(told.get("md5Hash"), str) else None
    found = _HEX.fullmatch(str(told.get("ETag", "")))
    if digest is None and found and hasattr(filesystem, "call_s3"):
        return Remote(url, size, mark, True, ("md5", found[1]), read, confirm, doubt)
    return Remote(url, size, mark, True, digest, read, confirm)


def _version(info: Mapping[str, Any]) -> str:
    """What tells a version from others, of all that file systems tell."""
    names = ("ETag", "etag", "generation", "VersionId", "LastModified", "last_modified", "updated", "mtime", "created")
    return "|".join(f"{name}={info[name]}" for name in names if info.get(name) is not None)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn what a file system raises into an OSError that stays, or into Interrupted: each has errors of its own."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        kind = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
        said = "no such file" if isinstance(error, FileNotFoundError) else f"access denied: {error}"
        raise type(error)(kind, said, shown(url)) from None
    except (ImportError, Changed, Interrupted, GeneratorExit):
        raise
    except Exception as error:
        raise Interrupted(_told(error)) from None
