"""References from the web, from a server on this machine: what is kept is what was asked for, or nothing."""

import contextlib
import http.server
import io
import os
import socket
import threading
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from PIL import Image

from opensora.inference.fetch import TOTAL_S, fetch, is_url
from opensora.inference.output import save_sample
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
    "/clip": (200, {"Content-Type": "video/mp4"}, "clip.mp4"),
    "/unknown.webm": (200, {"Content-Type": "application/octet-stream"}, "clip.webm"),
    "/untold.png": (200, {}, RED),
    "/odd.png": (200, {"Content-Type": "image/x-own-kind"}, RED),
    "/page.png": (200, {"Content-Type": "text/html"}, b"<html>please log in</html>"),
    "/page-as-image.png": (200, {"Content-Type": "image/png"}, b"<html>please log in</html>"),
    "/page-as-clip": (200, {"Content-Type": "video/mp4"}, b"<html>please log in</html>"),
    "/half.png": (200, {"Content-Type": "image/png"}, RED[: len(RED) // 2]),
    "/data": (200, {"Content-Type": "application/octet-stream"}, b"?"),
    "/missing.png": (404, {"Content-Type": "text/html"}, b"<html>404</html>"),
    "/broken.png": (500, {}, b""),
    "/empty.png": (200, {"Content-Type": "image/png"}, b""),
    "/cut.png": (200, {"Content-Type": "image/png", "Content-Length": "1000"}, RED),
    "/large.png": (200, {"Content-Type": "image/png", "Content-Length": "5000"}, b"x" * 5000),
    "/large-untold.png": (200, {"Content-Type": "image/png", "Content-Length": None}, b"x" * 5000),
    "/moved.png": (302, {"Location": "/a/image.png"}, b""),
    "/elsewhere.png": (302, {"Location": "ftp://127.0.0.1/image.png"}, b""),
    "/inward.png": (302, {"Location": "http://internal.test/a/image.png"}, b""),
    "/circle.png": (302, {"Location": "/circle.png"}, b""),
}


class Handler(http.server.BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []
    clips: Path

    def do_GET(self):
        self.requests.append(self.path)
        if self.path == "/slow.png":
            time.sleep(3)
            return
        if self.path in ("/drip.png", "/drip-headers.png"):  # a byte at a time, and never a long silence
            lines = b"HTTP/1.0 200 OK\r\nContent-Type: image/png\r\n"
            with contextlib.suppress(OSError):
                self.wfile.write(lines + b"\r\n" * (self.path == "/drip.png") + b"X-Rest: ")
                for _ in range(100):
                    time.sleep(0.05)
                    self.wfile.write(b"x")
            return
        status, headers, body = PAGES[self.path]
        body = (self.clips / body).read_bytes() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    Handler.clips = tmp_path_factory.mktemp("clips")
    for save_format in ("mp4", "webm"):
        save_sample(torch.zeros(3, 2, 16, 16), Handler.clips / "clip", 8, save_format=save_format)
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
        ("/page-as-image.png", "what the server sends is no image or video: the file "),
        ("/page-as-clip", "what the server sends is no image or video: the file "),
        ("/half.png", "what the server sends is no image or video: the file "),
        ("/elsewhere.png", "leads to 'ftp://127.0.0.1/image.png', which is not http"),
        ("/circle.png", "answers 302"),
        ("/slow.png", "cannot be fetched: "),
    ],
)
def test_what_is_no_file_is_refused_and_leaves_nothing(server, tmp_path, path, message):
    with pytest.raises(UserError, match=message) as caught:
        fetch(f"{server}{path}", tmp_path, timeout_s=1, max_bytes=4000)
    assert path in str(caught.value)
    assert ".partial-" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/drip.png", "/drip-headers.png"])
def test_the_time_for_all_of_it_is_limited(server, tmp_path, path):
    begin = time.monotonic()
    with pytest.raises(UserError, match=f"{path}: its time was over before it was complete; fetch it yourself"):
        fetch(f"{server}{path}", tmp_path, total_s=0.3)
    assert time.monotonic() - begin < 2
    assert list(tmp_path.iterdir()) == []


def test_what_an_older_version_kept_and_a_killed_process_left_goes(server, tmp_path):
    kept = fetch(f"{server}/a/image.png", tmp_path)
    kept.write_text("<html>please log in</html>")
    new, old = tmp_path / ".x.partial-1.png", tmp_path / ".x.png.partial-2"
    for file, age in ((new, 0), (old, 3 * TOTAL_S)):
        file.write_text("half")
        os.utime(file, (time.time() - age,) * 2)
    assert fetch(f"{server}/a/image.png", tmp_path) == kept
    assert kept.read_bytes() == RED
    assert Handler.requests == ["/a/image.png"] * 2
    assert sorted(tmp_path.iterdir()) == sorted([kept, new])


NOT_PUBLIC = "is not allowed here: use an uploaded image, or a file at a public web address."
INTERNAL = [
    "127.0.0.1", "2130706433", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "198.18.0.1", "[::1]", "[::]", "[fe80::1]", "[fc00::1]", "[ff0e::1]", "[::ffff:8.8.8.8]",
    "[64:ff9b::a00:1]", "[2002:a00:1::1]", "[2001:0:0a00:1::1]", "nowhere.invalid",
]  # fmt: skip


@pytest.mark.parametrize("host", INTERNAL)
def test_strangers_reach_public_addresses_only(tmp_path, host):
    with pytest.raises(UserError) as caught:
        fetch(f"http://{host}/x.png", tmp_path, public_only=True, timeout_s=1)
    assert str(caught.value) == f"reference http://{host}/x.png {NOT_PUBLIC}"


def test_strangers_reach_no_files_and_not_the_cache_of_others(server, tmp_path):
    fetch(f"{server}/a/image.png", tmp_path)
    there = tmp_path / "there.png"
    there.write_bytes(RED)
    for source in (str(there), "missing.png", "file:///etc/passwd", f"{server}/a/image.png", f"{server}/missing.png"):
        with pytest.raises(UserError) as caught:
            fetch(source, tmp_path, public_only=True)
        assert str(caught.value) == f"reference {source} {NOT_PUBLIC}"
    assert Handler.requests == ["/a/image.png"]


@pytest.fixture
def internet(server, monkeypatch):
    """Names as a hostile name server gives them, public addresses that this machine's server stands for; the connections made."""
    port, made = int(server.rpartition(":")[2]), []
    real_resolve, real_connect = socket.getaddrinfo, socket.create_connection
    answers = {
        "public.test": [["93.184.216.34"], ["127.0.0.1"]],  # another one each time
        "both.test": [["93.184.216.34", "10.0.0.1"]],
        "internal.test": [["127.0.0.1"]],
    }

    def resolve(host, *args, **kwargs):
        if host not in answers:
            return real_resolve(host, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in answers[host].pop(0)]

    def connect(address, *args, **kwargs):
        made.append(address)
        return real_connect(("127.0.0.1", port), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    return made


def test_the_connection_goes_to_the_address_that_was_checked(internet, tmp_path):
    """A name server may give an internal address the second time: DNS rebinding."""
    assert fetch("http://public.test/a/image.png", tmp_path, public_only=True).read_bytes() == RED
    assert internet == [("93.184.216.34", 80)]


@pytest.mark.parametrize(("host", "seen"), [("public.test", ["/inward.png"]), ("both.test", [])])
def test_a_redirect_and_a_second_address_are_checked_too(internet, tmp_path, host, seen):
    with pytest.raises(UserError) as caught:
        fetch(f"http://{host}/inward.png", tmp_path, public_only=True)
    assert str(caught.value) == f"reference http://{host}/inward.png {NOT_PUBLIC}"
    assert Handler.requests == seen


def test_no_proxy_resolves_what_strangers_name(internet, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://public.test")
    with pytest.raises(UserError, match=NOT_PUBLIC):
        fetch("http://10.0.0.1/a/image.png", tmp_path, public_only=True)
    assert internet == []


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
