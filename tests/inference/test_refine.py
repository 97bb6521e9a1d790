"""A language model's prompts are asked for once, go into names and sidecars, and are not asked for again."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from opensora.inference.jobs import jobs, records
from opensora.inference.prompts import without_scores
from opensora.inference.sizes import stated_size
from opensora.utils.errors import UserError


@pytest.fixture
def server(monkeypatch):
    """An OpenAI-compatible server that answers with the prompt in capitals, named by the environment; the list of its requests."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(
                (self.path, self.headers["Authorization"], request["model"], request["messages"][-1]["content"])
            )
            text = request["messages"][-1]["content"]
            self.send_response(500 if "broken" in text else 200)
            self.end_headers()
            content = "" if "silent" in text else f"  {text.upper()}\n"
            self.wfile.write(json.dumps({"choices": [{"message": {"content": content}}]}).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{running.server_port}/v1/")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        monkeypatch.setenv("OPENAI_MODEL", "small")
        yield seen
        running.shutdown()


def test_prompts_are_rewritten_once_and_samples_remember_what_was_written(cfg, server, tmp_path):
    prompts = ['a lake{"seed": 3}', "|0|a lake|1|a storm", ""]
    cfg = replace(cfg, prompt=prompts, save_dir=str(tmp_path), llm_refine=True, aes=6.5, loop=2)
    made = jobs(cfg)
    texts = [[without_scores(segment.text) for segment in job.item.segments] for job in made]
    assert texts == [["A LAKE"], ["A LAKE", "A STORM"], [""]]
    assert made[0].item.text == "A LAKE aesthetic score: 6.5."
    assert made[0].item.overrides == {"seed": 3}
    assert server == [("/v1/chat/completions", "Bearer secret", "small", text) for text in ("a lake", "a storm")]
    assert jobs(cfg) == made  # as every process, and the same command again
    assert len(server) == 2
    (sidecar, *_) = records(cfg, made, stated_size(cfg))
    assert (sidecar["prompt"], sidecar["config"]["llm_refine"]) == (made[0].item.text, False)  # so remake asks nobody


@pytest.mark.parametrize(("text", "said"), [("broken", "HTTP Error 500"), ("silent", r"'silent' \(an empty answer")])
def test_a_server_that_fails_ends_the_run(cfg, server, tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        jobs(replace(cfg, prompt=["a lake", text], save_dir=str(tmp_path), llm_refine=True))
    assert list(json.loads((tmp_path / "refined_prompts.json").read_text())) == ["a lake"]  # which is paid for
