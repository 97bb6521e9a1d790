"""Captions by a small LLaVA of random weights and by a server on this machine."""

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from opensora.datasets.table.files import read_frame
from opensora.inference.prompts import with_scores
from opensora.utils.errors import UserError
from tools.caption.__main__ import captioner_of, main, read_arguments
from tools.caption.captioner import EMPTY, Captioner, describer, suffixed
from tools.caption.prompts import TEMPLATES, columns_in, filled, prompt_of

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
PATHS = [CLIPS / f"{name}.mp4" for name in ("white_dog", "city_teal", "cup_portrait", "pink_clouds")]
WORDS = ["<pad>", "<unk>", "</s>", "<image>", "USER:", "ASSISTANT:", "a", "dog", "runs", "over", "grass", "."]
CHAT = (
    "{% for m in messages %}USER: {% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}"
    "{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}ASSISTANT:"
)


@pytest.fixture(scope="module", params=["chat template", "no template"])
def llava(request, tmp_path_factory):
    """A folder as save_pretrained leaves it."""
    folder = tmp_path_factory.mktemp("llava")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
        model_input_names=["input_ids", "attention_mask"],
    )
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        fast, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=CHAT if request.param == "chat template" else None,
    )  # fmt: skip
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**width, image_size=28, patch_size=14),
        text_config=LlamaConfig(**width, vocab_size=len(WORDS), pad_token_id=0, eos_token_id=2),
        image_token_index=WORDS.index("<image>"),
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def test_a_llava_writes_the_same_captions_alone_and_in_a_batch(llava):
    captioner = Captioner(model=llava, max_tokens=8, frames=2, retries=0, dtype="float32")
    together = captioner.score(PATHS)
    alone = [captioner.score([path])[0] for path in PATHS]
    assert together == alone
    assert any(row["text"] for row in together)
    assert all(set((row["text"] or "").split()) <= set(WORDS) for row in together)
    short = Captioner(model=llava, max_tokens=8, frames=2, retries=0, dtype="float32", prompt="A dog runs over grass .")
    assert columns_in(prompt_of(short.prompt)) == ()


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="vision-language model: there is no folder"):
        Captioner(model=str(tmp_path / "none")).score(PATHS[:1])


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers from a list of (code, caption), then with the size of the first image."""

    def __init__(self, *answers):
        self.answers, self.requests, self.lock, self.broken = list(answers), [], threading.Lock(), None
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, self.headers.get("Authorization"), body))
            described = 200, self.described(body)
            code, text = self.server.answers.pop(0) if self.server.answers else described
            if self.server.broken:
                code, text = self.server.broken(described[1])
        choices = [] if text is None else [{"message": {"content": text}}]
        payload = json.dumps({"choices": choices} if code < 400 else {"error": text}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(payload)

    def described(self, body):
        urls = [c["image_url"]["url"] for c in body["messages"][0]["content"] if c["type"] == "image_url"]
        width, height = Image.open(io.BytesIO(base64.b64decode(urls[0].partition(",")[2]))).size
        return f"{len(urls)} frames of\n {width} x {height}."

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    pytest.importorskip("openai")
    started = []

    def start(*answers):
        started.append(Server(*answers))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


def test_an_endpoint_sees_the_frames_the_prompt_and_the_key(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    there = server()
    captioner = Captioner(
        model="m", endpoint=there.url, prompt="Correct this: {draft}", frames=3, long_side=160, key_env="MY_KEY"
    )
    assert captioner.needs == ("draft",)
    assert captioner.score(PATHS[:1], draft=["a {dog}"]) == [{"text": "3 frames of 160 x 90."}]
    ((path, key, body),) = there.requests
    assert (path, key, body["model"], body["max_tokens"]) == ("/v1/chat/completions", "Bearer secret", "m", 200)
    assert body["messages"][0]["content"][-1] == {"type": "text", "text": "Correct this: a {dog}"}
    assert "secret" not in repr(captioner)


def test_errors_of_the_server_and_empty_captions_are_tried_again(server):
    there = server((503, ""), (200, "  "), (200, "a dog."))
    assert Captioner(model="m", endpoint=there.url).score(PATHS[:1]) == [{"text": "a dog."}]
    assert len(there.requests) == 3


def test_what_stays_without_a_caption_has_a_reason(server):
    there = server((200, ""), (200, ""))
    broken = CLIPS / "none.mp4"
    empty, missing = Captioner(model="m", endpoint=there.url, retries=1).score([PATHS[0], broken])
    assert empty == {"text": None, "error": EMPTY}
    assert missing["text"] is None
    assert "none.mp4" in missing["error"]


def test_a_wrong_key_ends_the_run(server):
    there = server((401, ""))
    with pytest.raises(UserError, match=r"401.*key in OPENAI_API_KEY"):
        Captioner(model="m", endpoint=there.url).score(PATHS[:1])
    assert len(there.requests) == 1


def test_a_server_that_is_not_there_ends_the_run():
    pytest.importorskip("openai")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*the same command resumes"):
        Captioner(model="m", endpoint="http://127.0.0.1:9/v1", retries=0, timeout_s=2).score(PATHS[:2])


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_refused_request_costs_its_own_row_and_is_not_sent_again(server, code):
    there = server((code, "content filter"))
    first, second = (Captioner(model="m", endpoint=there.url).score([path])[0] for path in PATHS[:2])
    assert f"{code}" in first["error"]
    assert "content filter" in first["error"]
    assert second["text"].startswith("4 frames")
    assert len(there.requests) == 2


@pytest.mark.parametrize("code", [401, 403, 404, 405])
def test_wrong_settings_end_the_run(server, code):
    with pytest.raises(UserError, match=f"{code}.*is the model's name right"):
        Captioner(model="m", endpoint=server((code, "")).url).score(PATHS[:1])


def test_a_clip_that_breaks_the_server_each_time_costs_its_own_row(server):
    there = server()
    there.broken = lambda text: (500, "") if "320 x 180" in text else (200, text)
    rows = Captioner(model="m", endpoint=there.url, retries=1).score(PATHS[:1])
    assert "500" in rows[0]["error"]  # but for a plain image, there is an answer


def test_an_answer_that_is_no_chat_ends_the_run(server):
    there = server()
    there.broken = lambda text: (200, None)
    with pytest.raises(UserError, match="no chat completion"):
        Captioner(model="m", endpoint=there.url, retries=0).score(PATHS[:1])


def test_half_an_emoji_becomes_a_mark_in_the_table(server, tmp_path, monkeypatch):
    there = server((200, "a fox \ud83e\udd8a runs \ud83d"))
    command(monkeypatch, tmp_path, there.url, "--batch-size", "1")
    main()
    assert read_frame(tmp_path / "out.csv")["text"][0] == "a fox 🦊 runs \ufffd"


def command(monkeypatch, folder, url, *options):
    table = folder / "clips.csv"
    if not table.exists():
        pd.DataFrame({"path": [p.name for p in PATHS]}).to_csv(table, index=False)
    argv = [
        "caption", str(table), "--root", str(CLIPS), "--out", str(folder / "out.csv"), "--model", "m", "--endpoint", url,
        "--num-workers", "0", "--part-rows", "3", "--retries", "1", *options,
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", argv)


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_server_that_is_away_for_a_while_leaves_its_rows_to_the_next_run(server, tmp_path, monkeypatch, capsys, code):
    there = server()
    command(monkeypatch, tmp_path, there.url, "--batch-size", "1")
    there.broken = lambda text: (code, "") if len(there.requests) > 2 else (200, text)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"{code}" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
    there.broken, sent = None, len(there.requests)
    main()
    assert len(there.requests) - sent == 2  # what was captioned before is not sent again
    out = read_frame(tmp_path / "out.csv")
    assert out["status"].tolist() == ["ok"] * 4
    assert all(out["text"])


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.multiprocess
def test_rows_that_failed_are_tried_again_and_no_others(server, tmp_path, monkeypatch, workers):
    there = server((200, "one."), (400, "filtered"), (200, "three."), (400, "filtered"))
    command(monkeypatch, tmp_path, there.url, "--batch-size", "1")
    main()
    assert [bool(text) for text in read_frame(tmp_path / "out.csv")["text"]] == [True, False, True, False]
    describer.cache_clear()
    command(
        monkeypatch, tmp_path, there.url, "--retry-failed", "--overwrite", "--timeout-s", "60", "--num-workers", workers
    )
    main()
    out = read_frame(tmp_path / "out.csv")
    assert out["text"].tolist()[::2] == ["one.", "three."]
    assert all(text.startswith("4 frames") for text in out["text"].tolist()[1::2])
    assert out["status"].tolist() == ["ok"] * 4
    assert len(there.requests) == 6


def test_the_command_resumes_where_it_stopped(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    table = tmp_path / "clips.csv"
    pd.DataFrame({"path": [p.name for p in PATHS], "aes": [5.5, None, 4, 3]}).to_csv(table, index=False)
    there = server((200, "a."), (200, "b."), (401, ""))
    argv = [
        "caption", str(table), "--root", str(CLIPS), "--out", str(tmp_path / "out.csv"), "--model", "m", "--endpoint", there.url,
        "--batch-size", "1", "--part-rows", "2", "--num-workers", "0", "--scores", "aes",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit):
        main()
    assert len(there.requests) == 3
    main()
    assert len(there.requests) == 5  # the last two
    out = read_frame(tmp_path / "out.csv")
    assert out["text"].tolist()[:2] == ["a. aesthetic score: 5.5.", "b."]
    assert out["text"][3].endswith("x 180. aesthetic score: 3.0.")
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"secret" not in file.read_bytes()


def test_scores_are_written_as_prompts_for_sampling_have_them():
    scores = {"aes": "5.53", "flow": 2, "cmotion": "pan_left"}
    as_prompt = with_scores("A dog.", {"aes": 5.53, "flow": 2.0, "camera_motion": "pan left"})
    assert (
        suffixed("A dog.", scores)
        == as_prompt
        == "A dog. aesthetic score: 5.5. motion score: 2.0. camera motion: pan left."
    )
    assert suffixed("A dog.", {"aes": "", "flow": float("nan"), "cmotion": "unclassified"}) == "A dog."


def test_prompts_and_their_mistakes(tmp_path):
    assert filled(prompt_of("refine"), {"text": ["a dog"]}, 0).count("a dog") == 1
    (tmp_path / "p.txt").write_text("Describe {{it}}.\n")
    assert filled(prompt_of(str(tmp_path / "p.txt")), {}, 0) == "Describe {it}."
    assert set(map(columns_in, TEMPLATES.values())) == {(), ("text",)}
    for prompt, message in {" ": "empty", "vidoe": "no template", "a {b": "brace", "a {} b": "names no column"}.items():
        with pytest.raises(UserError, match=message):
            prompt_of(prompt)


def test_options_without_effect_are_errors(tmp_path):
    common = ["t.csv", "--out", "o.csv", "--model", "m"]
    with pytest.raises(UserError, match="--device has no effect with --endpoint"):
        captioner_of(read_arguments([*common, "--endpoint", "http://x/v1", "--device", "cuda"]))
    with pytest.raises(UserError, match="--timeout-s has no effect without --endpoint"):
        captioner_of(read_arguments([*common, "--timeout-s", "3"]))
    with pytest.raises(UserError, match="--frames 0"):
        captioner_of(read_arguments([*common, "--frames", "0"]))
