"""References from the web: fetched once, checked before they are kept, stored under a hash of their full address.

An answer that cannot be decoded as an image or video is refused, whatever its address or its type say; two addresses with the
same last part cannot collide; a file is complete or not there, also when several processes fetch it at once.

Strangers, as the visitors of the demo, may only name what everybody can reach (`public_only`): the name is resolved once, its
addresses are checked, and the connection goes to one of those, after each redirect again.
"""

import contextlib
import hashlib
import http.client
import ipaddress
import logging
import mimetypes
import os
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, BadFile
from opensora.datasets.video.read_video import open_clip
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # without a byte
TOTAL_S = 900.0
MAX_BYTES = 1 << 30
# kinds whose extension Python's table lacks, or has another of
EXTENSIONS = {
    "image/webp": ".webp", "image/avif": ".avif", "image/bmp": ".bmp", "video/webm": ".webm", "video/x-matroska": ".mkv",
    "video/mp4": ".mp4", "video/quicktime": ".mov", "video/x-msvideo": ".avi", "image/jpeg": ".jpg", "image/tiff": ".tif",
}  # fmt: skip
UNKNOWN = ("application/octet-stream", "binary/octet-stream")  # from servers that do not know the type
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # the rest is local, or stands for IPv4 addresses


def is_url(source: str) -> bool:
    """Whether a reference is to be fetched."""
    return source.lower().startswith(("http://", "https://"))


def fetch(
    source: str,
    cache: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    total_s: float = TOTAL_S,
    max_bytes: int = MAX_BYTES,
    public_only: bool = False,
) -> Path:
    """A local file for a path, which is returned as it is, or for an http(s) URL, which is fetched unless `cache` has it.

    Args:
        source: the path or URL.
        cache: the folder of what was fetched; a file in it that cannot be decoded is removed, and fetched again.
        timeout_s: the longest silence of the server, in seconds.
        total_s: the longest time for all of it, in seconds.
        max_bytes: the largest file.
        public_only: refuse local files and addresses that are not public, with one text that tells nothing about them.

    Raises:
        UserError: the server refuses or does not answer; what it sends is no image or video, too large, too slow or truncated.
    """
    if not is_url(source):
        if public_only:
            raise _not_public(source)
        if "://" in source:
            raise UserError(f"reference {source!r}: only http and https are fetched; give a file's path otherwise.")
        return Path(source)
    # a visitor gets no file that was fetched for somebody who may reach more
    name = hashlib.blake2b((source + " public" * public_only).encode(), digest_size=16).hexdigest()
    for kept in sorted(cache.glob(f"{name}.*")):
        try:
            _check_decodes(kept)
            return kept
        except BadFile as error:
            logger.warning("reference %s is fetched again: %s", source, error)
            kept.unlink(missing_ok=True)
    web = _Web(source, public_only=public_only)
    timer = threading.Timer(total_s, web.end)  # the sockets' own time-out begins again with each byte
    timer.daemon = True
    timer.start()
    no_proxy = [urllib.request.ProxyHandler({})] if public_only else []  # a proxy would resolve the name for itself
    try:
        request = urllib.request.Request(source, headers={"User-Agent": "opensora"})
        opener = urllib.request.build_opener(web, *no_proxy)
        with opener.open(request, timeout=timeout_s) as answer:
            return _keep(answer, cache / f"{name}{_extension(source, answer.headers)}", source, max_bytes, web.check)
    except urllib.error.HTTPError as error:
        raise UserError(
            f"reference {source}: the server answers {error.code} {error.reason}; check the address."
        ) from error
    except UserError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, time-out, a malformed address
        web.check()
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise UserError(f"reference {source} cannot be fetched: {reason}.") from error
    finally:
        timer.cancel()
        for each in web.sockets:
            each.close()


def _not_public(source: str) -> UserError:
    return UserError(
        f"reference {source} is not allowed here: use an uploaded image, or a file at a public web address."
    )


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip not in GLOBAL_UNICAST or ip.sixtofour):
        return False
    return ip.is_global and not ip.is_multicast


class _Web(urllib.request.HTTPSHandler, urllib.request.HTTPHandler, urllib.request.HTTPRedirectHandler):
    """The connections of one fetch, which go to http(s) only (urllib would also follow to ftp) and which `end` ends."""

    def __init__(self, source: str, *, public_only: bool) -> None:
        super().__init__()
        self.source, self.public_only, self.is_over = source, public_only, False
        self.sockets: list[socket.socket] = []

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not is_url(newurl):
            raise UserError(f"reference {req.full_url}: leads to {newurl!r}, which is not http(s).")
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def do_open(self, http_class: Any, req: urllib.request.Request, **settings: Any) -> Any:
        def connection(*args: Any, **kwargs: Any) -> http.client.HTTPConnection:
            made = http_class(*args, **kwargs)
            made._create_connection = self._connect
            return made

        return super().do_open(connection, req, **settings)

    def _connect(self, address: tuple[str, int], *settings: Any) -> socket.socket:
        if self.public_only:
            try:
                found = [str(entry[4][0]) for entry in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
            except (OSError, UnicodeError):  # nor does the answer show whether an internal name exists
                found = []
            if not found or not all(map(_is_public, found)):
                raise _not_public(self.source)
            address = (found[0], address[1])
        connected = socket.create_connection(address, *settings)
        self.sockets.append(connected.dup())  # TLS takes the other one over
        self.check()
        return connected

    def end(self) -> None:
        self.is_over = True
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise a `UserError` if it was ended."""
        if self.is_over:
            raise UserError(f"reference {self.source}: its time was over before it was complete; fetch it yourself.")


def _extension(source: str, headers: Mapping[str, str]) -> str:
    """By the type of the content; by the address only where that tells nothing."""
    kind = (headers.get("Content-Type") or UNKNOWN[0]).partition(";")[0].strip().lower()
    extension = EXTENSIONS.get(kind) or mimetypes.guess_extension(kind)
    known = (*IMAGE_EXTENSIONS, *VIDEO_EXTENSIONS)
    if extension not in known:
        extension = PurePosixPath(urlsplit(source).path).suffix.lower()
    if extension not in known or not (kind in UNKNOWN or kind.startswith(("image/", "video/"))):
        raise UserError(
            f"reference {source}: the server sends {kind!r}, no image or video that is known; is it the address of a page?"
        )
    return extension


def _keep(answer: Any, target: Path, source: str, max_bytes: int, check: Callable[[], None]) -> Path:
    """Write what arrives under a temporary name, and rename it when it is complete and can be decoded."""
    text = answer.headers.get("Content-Length") or ""
    length, count = int(text) if text.isdecimal() else None, 0
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".*.partial-*"):  # by a process that was killed: nobody has written for long
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * TOTAL_S:
                left.unlink()
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}.partial-", suffix=target.suffix, dir=target.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            while max(count, length or 0) <= max_bytes and (block := answer.read(1 << 20)):
                count += len(block)
                file.write(block)
        check()
        if max(count, length or 0) > max_bytes:
            raise UserError(
                f"reference {source}: larger than {max_bytes} bytes; fetch it yourself, and give the file's path."
            )
        if not count or (length is not None and count != length):
            raise UserError(f"reference {source}: {count} bytes of {length} arrived; try again.")
        try:
            _check_decodes(partial)
        except BadFile as error:
            reason = str(error).replace(str(partial), "the file")
            raise UserError(f"reference {source}: what the server sends is no image or video: {reason}") from error
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    logger.info("reference %s: %d bytes, kept as %s", source, count, target)
    return target


def _check_decodes(path: Path) -> None:
    """Decode its first frame; a `BadFile` where that is not possible."""
    with open_clip(path) as clip:
        clip.read([0])
