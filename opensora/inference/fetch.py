"""References from the web: fetched once, checked before they are kept, stored under a hash of their full address.

An answer that is no image or video is refused, whatever its address is called; two addresses with the same last part
cannot collide; a file is complete or not there, also when several processes fetch it at once.
"""

import hashlib
import http.client
import logging
import mimetypes
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # without a byte
MAX_BYTES = 1 << 30
# kinds whose extension Python's table lacks, or has another of
EXTENSIONS = {
    "image/webp": ".webp", "image/avif": ".avif", "image/bmp": ".bmp", "video/webm": ".webm", "video/x-matroska": ".mkv",
    "video/mp4": ".mp4", "video/quicktime": ".mov", "video/x-msvideo": ".avi", "image/jpeg": ".jpg", "image/tiff": ".tif",
}  # fmt: skip
UNKNOWN = ("application/octet-stream", "binary/octet-stream")  # from servers that do not know the type


def is_url(source: str) -> bool:
    """Whether a reference is to be fetched."""
    return source.lower().startswith(("http://", "https://"))


def fetch(source: str, cache: Path, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BYTES) -> Path:
    """A local file for a path, which is returned as it is, or for an http(s) URL, which is fetched unless `cache` has it.

    Raises:
        UserError: the server refuses or does not answer, what it sends is no image or video, too large or truncated.
    """
    if not is_url(source):
        if "://" in source:
            raise UserError(f"reference {source!r}: only http and https are fetched; give a file's path otherwise.")
        return Path(source)
    name = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    if kept := sorted(cache.glob(f"{name}.*")):
        return kept[0]
    try:
        request = urllib.request.Request(source, headers={"User-Agent": "opensora"})
        with urllib.request.build_opener(_WebOnly).open(request, timeout=timeout_s) as answer:
            return _keep(answer, cache / f"{name}{_extension(source, answer.headers)}", source, max_bytes)
    except urllib.error.HTTPError as error:
        raise UserError(
            f"reference {source}: the server answers {error.code} {error.reason}; check the address."
        ) from error
    except UserError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, time-out, a malformed address
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise UserError(f"reference {source} cannot be fetched: {reason}.") from error


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows to http(s) only: urllib would also go to ftp."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not is_url(newurl):
            raise UserError(f"reference {req.full_url}: leads to {newurl!r}, which is not http(s).")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


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


def _keep(answer: Any, target: Path, source: str, max_bytes: int) -> Path:
    """Write what arrives under a temporary name, and rename it when it is complete."""
    text = answer.headers.get("Content-Length") or ""
    length, count = int(text) if text.isdecimal() else None, 0
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.partial-", dir=target.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            while max(count, length or 0) <= max_bytes and (block := answer.read(1 << 20)):
                count += len(block)
                file.write(block)
        if max(count, length or 0) > max_bytes:
            raise UserError(
                f"reference {source}: larger than {max_bytes} bytes; fetch it yourself, and give the file's path."
            )
        if not count or (length is not None and count != length):
            raise UserError(f"reference {source}: {count} bytes of {length} arrived; try again.")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    logger.info("reference %s: %d bytes, kept as %s", source, count, target)
    return target
