"""An endpoint for captions, and a training config for what a chain leaves."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.scripts.conftest import toy_encoders, train_script

__all__ = ["toy_encoders", "train_script"]


class Answers(BaseHTTPRequestHandler):
    """An endpoint that has one thing to say of each image."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        text = f"A clip of {len(body)} bytes.".encode()
        reply = b'{"choices": [{"message": {"content": "' + text + b'"}, "finish_reason": "stop"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """It lets a whole batch of requests wait."""

    request_queue_size = 64


@pytest.fixture(scope="session")
def endpoint():
    """The URL of a server on this machine."""
    pytest.importorskip("openai")
    server = Server(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.fixture(scope="session")
def toy_training(toy_encoders, tmp_path_factory) -> Callable[[Path], Path]:
    """`toy_training(table)` is a config of four steps over a table, all classes real and small."""

    def write(table: Path) -> Path:
        fields = {
            "dataset": {"type": "VariableVideoTextDataset"},
            "data_path": str(table),
            "bucket_config": {"32px": {8: (1.0, 2), 4: (1.0, 2)}},
            "num_workers": 0,
            "dtype": "fp32",
            "device": "cpu",
            "model": {"type": "STDiT2", "depth": 2, "hidden_size": 48, "num_heads": 2, "input_sq_size": 32},
            "vae": {"type": "VideoAutoencoderKL", "from_pretrained": str(toy_encoders["vae"])},
            "text_encoder": {"type": "hf", "from_pretrained": str(toy_encoders["text"]), "model_max_length": 12},
            "scheduler": {"type": "iddpm"},
            "max_steps": 4,
            "log_every": 1,
            "lr": 1e-3,
        }
        path = tmp_path_factory.mktemp("training") / "toy.py"
        path.write_text('"""Toy."""\n' + "".join(f"{name} = {value!r}\n" for name, value in fields.items()))
        return path

    return write
