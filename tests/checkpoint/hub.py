"""A model hub on this machine: just enough of its protocol for the real client."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(repo: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one repository; yields the hub's address and the growing list of the files that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self._answer(body=False)

        def do_GET(self):
            self._answer(body=True)

        def log_message(self, *args):
            pass

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith(f"/api/models/{repo}/tree"):
                self._json([_entry(name, data) for name, data in files.items()])
            elif path.startswith(f"/api/models/{repo}"):
                siblings = [{"rfilename": name} for name in files]
                self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})
            elif path.startswith(f"/{repo}/resolve/") and path.split("/", 5)[5] in files:
                name = path.split("/", 5)[5]
                if body:
                    fetched.append(name)
                self._send(files[name] if body else b"", len(files[name]), {"ETag": f'"{_digest(files[name])}"'})
            else:
                self._send(b"", 0, {"X-Error-Code": "RepoNotFound"}, status=404)

        def _json(self, content: object) -> None:
            data = json.dumps(content).encode()
            self._send(data, len(data), {"Content-Type": "application/json"})

        def _send(self, data: bytes, length: int, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(length)}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
