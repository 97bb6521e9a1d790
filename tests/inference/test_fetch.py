"""References from the web, from a server on this machine: what is kept is what was asked for, or nothing."""

import http.server
import io
import threading
import time
from multiprocessing.pool import ThreadPool
from typing import ClassVar

import pytest
from PIL import Image

from opensora.inference.fetch import fetch, is_url
from opensora.utils.errors import UserError


def png(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(file, "png")
    return file.getvalue()


RED, BLUE = png((255, 0, 0)), png((0, 0, 255))
PAGES = {
    # path: status, headers, body
    "/a/image.png": (200, {"Content-Type": "image/png"}, RED),
    "/b/image.png": (200, {"Content-Type": "image/png"}, BLUE),
    "/image.png?size=2": (200, {"Content-Type": "image/png; charset=binary"}, BLUE),
    "/picture": (200, {"Content-Type": "image/jpeg"}, RED),
    "/clip": (200, {"Content-Type": "video/mp4"}, b"mp4"),
    "/unknown.webm": (200, {"Content-Type": "application/octet-stream"}, b"webm"),
    "/untold.png": (200, {}, RED),
    "/odd.png": (200, {"Content-Type": "image/x-own-kind"}, RED),
    "/page.png": (200, {"Content-Type": "text/html"}, b"<html>please log in</html>"),
    "/data": (200, {"Content-Type": "application/octet-stream"}, b"?"),
    "/missing.png": (404, {"Content-Type": "text/html"}, b"<html>404</html>"),
    "/broken.png": (500, {}, b""),
    "/empty.png": (200, {"Content-Type": "image/png"}, b""),
    "/cut.png": (200, {"Content-Type": "image/png", "Content-Length": "1000"}, RED),
    "/large.png": (200, {"Content-Type": "image/png", "Content-Length": "5000"}, b"x" * 5000),
    "/large-untold.png": (200, {"Content-Type": "image/png", "Content-Length": None}, b"x" * 5000),
    "/moved.png": (302, {"Location": "/a/image.png"}, b""),
    "/elsewhere.png": (302, {"Location": "ftp://127.0.0.1/image.png"}, b""),
    "/circle.png": (302, {"Location": "/circle.png"}, b""),
}


class Handler(http.server.BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []

    def do_GET(self):
        self.requests.append(self.path)
        if self.path == "/slow.png":
            time.sleep(3)
            return
        status, headers, body = PAGES[self.path]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.requests.clear()


def test_files_of_one_name_do_not_collide(server, tmp_path):
    """OS 1.2's `download_url` saved both under "image.png"."""
    red, blue, query = (
        fetch(f"{server}{path}", tmp_path) for path in ("/a/image.png", "/b/image.png", "/image.png?size=2")
    )
    assert (red.read_bytes(), blue.read_bytes(), query.read_bytes()) == (RED, BLUE, BLUE)
    assert len({red, blue, query}) == 3
    assert {path.suffix for path in (red, blue, query)} == {".png"}


def test_what_was_fetched_is_not_fetched_again(server, tmp_path):
    first = fetch(f"{server}/a/image.png", tmp_path / "new" / "cache")
    assert fetch(f"{server}/a/image.png", tmp_path / "new" / "cache") == first
    assert Handler.requests == ["/a/image.png"]
    assert [file.name for file in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize(
    ("path", "suffix"),
    [
        ("/picture", ".jpg"),
        ("/clip", ".mp4"),
        ("/unknown.webm", ".webm"),
        ("/untold.png", ".png"),
        ("/odd.png", ".png"),
        ("/moved.png", ".png"),
    ],
)
def test_the_kind_is_what_the_server_says(server, tmp_path, path, suffix):
    assert fetch(f"{server}{path}", tmp_path).suffix == suffix


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing.png", "the server answers 404 Not Found; check the address"),
        ("/broken.png", "the server answers 500"),
        ("/page.png", "the server sends 'text/html', no image or video.*is it the address of a page"),
        ("/data", "the server sends 'application/octet-stream'"),
        ("/empty.png", "0 bytes of 0 arrived"),
        ("/cut.png", "bytes of 1000 arrived|cannot be fetched: IncompleteRead"),
        ("/large.png", "larger than 4000 bytes; fetch it yourself"),
        ("/large-untold.png", "larger than 4000 bytes"),
        ("/elsewhere.png", "leads to 'ftp://127.0.0.1/image.png', which is not http"),
        ("/circle.png", "answers 302"),
        ("/slow.png", "cannot be fetched: "),
    ],
)
def test_what_is_no_file_is_refused_and_leaves_nothing(server, tmp_path, path, message):
    with pytest.raises(UserError, match=message) as caught:
        fetch(f"{server}{path}", tmp_path, timeout_s=1, max_bytes=4000)
    assert path in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x.png", "http://[::1/x.png", "http://", "http://127.0.0.1:port/x.png"]
)
def test_addresses_where_nobody_is(tmp_path, url):
    with pytest.raises(UserError, match=r"reference http.* cannot be fetched: "):
        fetch(url, tmp_path, timeout_s=1)


def test_other_sources(tmp_path):
    assert fetch("folder/a.png", tmp_path).parts == ("folder", "a.png")
    for source in ("ftp://host/a.png", "file:///etc/passwd"):
        with pytest.raises(UserError, match="only http and https are fetched"):
            fetch(source, tmp_path)
    assert is_url("HTTPS://host/a.png")
    assert not is_url("http/a.png")


def test_several_at_once(server, tmp_path):
    with ThreadPool(8) as pool:
        paths = pool.map(lambda _: fetch(f"{server}/a/image.png", tmp_path), range(16))
    assert set(paths) == {paths[0]}
    assert paths[0].read_bytes() == RED
    assert [file.name for file in tmp_path.iterdir()] == [paths[0].name]
