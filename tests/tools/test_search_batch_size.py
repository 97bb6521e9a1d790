"""tools/search_batch_size.py: the search by arithmetic, real steps at toy size, and the file it writes."""

import ast
import gc
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.acceleration.offload import OffloadedModule
from opensora.config.load import TrainConfig, parse_config, to_dict
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from tools.estimate import PARTS, read_config
from tools.search_batch_size import (
    MEASURED,
    WARM_UP,
    Clip,
    Limits,
    Outcome,
    Trainer,
    clips_of,
    largest,
    main,
    nearest,
    peak_gib,
    reset_peak,
    search,
    write_config,
)

CONFIG = Path("configs/quickstart/buckets.py").resolve()
SMALL = ("--model.depth=2", "--model.hidden_size=48", "--model.num_heads=2", "--device=cpu")
NO_LIMITS = Limits(None, None, 4)
CPU = World(0, 1, torch.device("cpu"))


@pytest.fixture
def cfg() -> TrainConfig:
    return parse_config(TrainConfig, PARTS, [str(CONFIG), *SMALL])


class Model:
    """Steps whose time and memory follow a law, and which counts how often it is asked."""

    def __init__(self, fits: int, seconds: float = 0.1, offset: float = 0.0) -> None:
        self.fits, self.seconds, self.offset, self.asked = fits, seconds, offset, []

    def __call__(self, batch: int) -> Outcome:
        self.asked.append(batch)
        return Outcome(batch <= self.fits, self.offset + self.seconds * batch, float(batch))


@pytest.mark.parametrize("fits", [0, 1, 2, 3, 7, 8, 13, 100])
@pytest.mark.parametrize("most", [1, 8, 50])
def test_the_largest_that_fits(fits, most):
    model = Model(fits)
    assert largest(model, most) == min(fits, most)
    assert max(model.asked) <= most  # never tries more than is allowed
    assert len(model.asked) <= 14


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.0, 10), (1.04, 10), (1.06, 11), (0.01, 1), (9.0, 20), (0.149, 1), (0.151, 2)]
)
def test_the_step_nearest_in_time(seconds, expected):
    assert nearest(Model(fits=20), seconds, 64) == expected


def test_nothing_fits():
    assert nearest(Model(fits=0), 1.0, 64) == 0


def test_the_largest_shape_stands_for_its_bucket(cfg):
    clips = clips_of(cfg)
    assert {(c.resolution, c.num_frames): c.batch for c in clips} == {
        ("96px", 4): 4, ("96px", 8): 2, ("96px", 16): 1, ("64px", 1): 8, ("64px", 4): 8, ("64px", 8): 4,
    }  # fmt: skip
    assert all(c.height % 16 == 0 and c.width % 16 == 0 for c in clips)


class Law:
    """Steps whose time is that of their tokens."""

    limits = Limits(None, None, 512)

    def __call__(self, clip: Clip, batch: int) -> Outcome:
        return Outcome(True, clip.num_frames * clip.height * clip.width * batch / 1e5, 1.0)


def test_even_steps_have_as_many_tokens_as_the_base_buckets(cfg):
    results = search(cfg, Law(), base="64px:8", even=True)
    base = next(clip for clip in results if clip.name == "64px:8")
    assert results[base][0] == base.batch
    for batch, outcome in results.values():
        assert outcome.seconds == pytest.approx(Law()(base, base.batch).seconds, rel=0.51 / batch)
    with pytest.raises(UserError, match=r"no such bucket.*96px:16"):
        search(cfg, Law(), base="480p:51", even=True)


@pytest.mark.slow
@pytest.mark.nightly
def test_real_steps_and_out_of_memory(cfg, monkeypatch):
    trainer = Trainer(cfg, CPU, NO_LIMITS, encoders=False)
    clip = next(clip for clip in clips_of(cfg) if clip.name == "64px:4")
    before = trainer.model.state_dict()["blocks.0.attn.qkv.weight"].clone()
    outcome = trainer(clip, 2)
    assert outcome.fits
    assert 0 < outcome.seconds < 60
    assert outcome.gib > 0.1
    assert not torch.equal(before, trainer.model.state_dict()["blocks.0.attn.qkv.weight"])  # it trained
    assert all(p.grad is None for p in trainer.model.parameters())
    monkeypatch.setattr(trainer.engine, "backward", out_of_memory)
    assert trainer(clip, 2) == Outcome(fits=False)
    monkeypatch.undo()
    assert trainer(clip, 1).fits  # it goes on
    trainer.limits = Limits(gib=1e-3, seconds=None, batch=4)
    assert not trainer(clip, 1).fits
    trainer.limits = Limits(gib=None, seconds=1e-6, batch=4)
    assert not trainer(clip, 1).fits


NOVA_SIZES = ("--model.width=64", "--model.num_heads=2", "--model.video_depth=2", "--model.image_depth=2",
              "--model.head_width=64", "--device=cpu", "--dtype=fp32", "--image-size=(32,64)")  # fmt: skip
WAN = ("--vae.from_pretrained=None", "--vae.subfolder=None",
       "--vae.architecture={'type':'AutoencoderKLWan','base_dim':8,'z_dim':16,'dim_mult':[1,1,1,1],'num_res_blocks':1}")  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(Path("configs/nova/train").resolve().glob("*.py")), ids=lambda path: path.stem)
def test_steps_of_every_config_of_nova(path):
    """Models of three stacks of blocks, without and with motion tokens."""
    vae = WAN if "DiffusersVideoVAE" in str(parse_config(TrainConfig, PARTS, [str(path), "--data-path=r"]).vae) else ()
    cfg = parse_config(TrainConfig, PARTS, [str(path), "--data-path=records", *NOVA_SIZES, *vae])
    trainer = Trainer(cfg, CPU, NO_LIMITS, encoders=False)
    (clip,) = clips_of(cfg)
    assert trainer(clip, 1).fits
    assert ("flow" in trainer.model.micro_conditions) == (cfg.num_frames > 1)
    assert trainer.model.in_channels == (16 if vae else 4)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_numbers_that_a_model_wants_are_encoded_too():
    """With --encoders; the flow is one that captions and pixels do not say."""
    nova = "{'type':'NOVA','width':32,'num_heads':1,'video_depth':1,'image_depth':2,'head_depth':1}"
    argv = [str(CONFIG), "--device=cpu", "--model", nova, "--scheduler={'type':'nova'}", "--grad-checkpoint=0"]
    trainer = Trainer(parse_config(TrainConfig, PARTS, argv), CPU, NO_LIMITS, encoders=True)
    assert trainer(Clip("64px", 4, 64, 96, 1), 1).fits


def test_encoders_are_offloaded_as_in_training(cfg, monkeypatch):
    seen, load = [], OffloadedModule.load
    monkeypatch.setattr(OffloadedModule, "load", lambda self: (seen.append(self), load(self)))
    trainer = Trainer(replace(cfg, encoder_offload=True), CPU, NO_LIMITS, encoders=True)
    assert trainer(Clip("64px", 1, 64, 64, 1), 1).fits
    assert len(seen) == 2 * (WARM_UP + MEASURED)
    assert not any(part.loaded for part in seen)


def out_of_memory(loss) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_a_lora_and_checkpointing_are_as_in_training(cfg):
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    argv = [str(CONFIG), *SMALL, "--lora.rank=2", "--grad-checkpoint=block"]
    trainer = Trainer(parse_config(TrainConfig, PARTS, argv), CPU, NO_LIMITS, encoders=False)
    assert trainer(clips_of(trainer.cfg)[-1], 1).fits
    assert all("lora_" in name for name, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.slow
def test_memory_of_a_cpu_has_a_peak_that_begins_anew():
    device = torch.device("cpu")
    gc.collect()  # what other tests left would go in between
    reset_peak(device)
    before = peak_gib(device)
    block = torch.ones(2**26)  # a quarter of a GiB
    during = peak_gib(device)
    del block
    assert 0.2 < during - before < 0.4
    reset_peak(device)
    assert peak_gib(device) < during - 0.1


def test_what_is_written_is_a_config(cfg, tmp_path):
    found = {clip: (0 if clip.name == "96px:16" else 3, Outcome(True, 0.5, 1.0)) for clip in clips_of(cfg)}
    out = write_config(tmp_path / "sub" / "out.py", CONFIG, cfg, found, CPU.device)
    again = parse_config(TrainConfig, PARTS, [str(out)])
    expected = {
        "96px": {4: (0.5, 3), 8: (0.5, 3), 16: (0.0, None)},
        "64px": {1: (1.0, 3), 4: (1.0, 3), 8: ((1.0, 0.5), 3)},
    }
    assert again.bucket_config == expected
    assert again.lr == cfg.lr
    assert "64px:4" in out.read_text()
    nothing = {clip: (0, Outcome(fits=False)) for clip in found}
    with pytest.raises(UserError, match="not even one sample"):
        write_config(tmp_path / "none.py", CONFIG, cfg, nothing, CPU.device)


def test_a_config_without_buckets(tmp_path):
    source = Path("configs/quickstart/train.py").resolve()
    cfg = parse_config(TrainConfig, PARTS, [str(source)])
    (clip,) = clips_of(cfg)
    assert clip == Clip("", 8, 96, 160, 8)
    out = write_config(tmp_path / "out.py", source, cfg, {clip: (5, Outcome(True, 1.0, 1.0))}, CPU.device)
    assert parse_config(TrainConfig, PARTS, [str(out)]).batch_size == 5


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("train.py", ["--num-frames", "4", "--image-size", "32", "32", "--ema-decay", "0.5"]),
        (
            "train.py",
            ["--model", "{'type':'STDiT2','depth':1,'hidden_size':48,'num_heads':2}", "--data-path=other.csv"],
        ),
        ("train.py", ["--dataset.num-frames=4", "--bucket-config=None", "--outputs", 'a "quote"\\x']),
        ("buckets.py", ["--bucket-config={'64px':{4:(1.0,2)}}", "--model.depth=2"]),
    ],
)
def test_what_the_command_line_sets_is_written_too(source, fields, tmp_path):
    """Read back it is the config that was measured, but for batch sizes."""
    path = Path("configs/quickstart").resolve() / source
    cfg, _ = read_config(path, [field for field in fields if field != "--data-path=other.csv"])
    if "--data-path=other.csv" in fields:  # read_config looks for it
        cfg = parse_config(TrainConfig, {**PARTS, "dataset": DATASETS}, [str(path), *fields])
    found = {clip: (5, Outcome(True, 0.5, 1.0)) for clip in clips_of(cfg)}
    out = write_config(tmp_path / "out.py", path, cfg, found, CPU.device, fields)
    again, expected = to_dict(read_config(out, ())[0]), to_dict(cfg)
    for batched in (again, expected):
        del batched["batch_size"]
        batched["dataset"].pop("bucket_config", None)
    buckets = again.pop("bucket_config"), expected.pop("bucket_config")
    assert again == expected
    assert buckets == ((None, None) if source == "train.py" else ({"64px": {4: (1.0, 5)}}, {"64px": {4: (1.0, 2)}}))
    assert shlex.join(fields) in ast.get_docstring(ast.parse(out.read_text()))


def test_buckets_that_a_dataset_has(tmp_path):
    source = tmp_path / "source.py"
    text = CONFIG.read_text().replace("text_columns=", 'bucket_config={"64px": {4: (1.0, 2)}}, text_columns=')
    source.write_text(text.replace("bucket_config = {", "_unused = {"))
    cfg, _ = read_config(source, ())
    (clip,) = clips_of(cfg)
    out = write_config(tmp_path / "out.py", source, cfg, {clip: (5, Outcome(True, 0.5, 1.0))}, CPU.device)
    assert read_config(out, ())[0].dataset["bucket_config"] == {"64px": {4: (1.0, 5)}}


def test_notes_are_shown_once(tmp_path, caplog):
    settings = tmp_path / "zero2.json"
    settings.write_text('{"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10}')
    source = tmp_path / "source.py"
    source.write_text(CONFIG.read_text() + "\ncast_once = True\n")
    fields = [*SMALL, f"--deepspeed={settings}"]
    cfg, _ = read_config(source, fields)
    write_config(tmp_path / "out.py", source, cfg, {clips_of(cfg)[0]: (5, Outcome(True))}, CPU.device, fields)
    assert caplog.text.count("steps_per_print") == 1
    assert caplog.text.count("note: ") == 2


def test_a_misspelt_option_before_the_config_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["search", "--max-bach", "2", str(CONFIG), str(tmp_path / "out.py")])
    with pytest.raises(SystemExit):
        main()
    assert "--max-bach is not a field of TrainConfig. Did you mean '--max-batch'?" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_line(monkeypatch, tmp_path, capsys):
    def run(*argv: str) -> None:
        monkeypatch.setattr(sys, "argv", ["search", str(CONFIG), str(tmp_path / "out.py"), *SMALL, *argv])
        main()

    for argv, words in (
        ((), "say what a step may take"),
        (("--goal", "even"), "needs one of --base and --base-seconds"),
        (("--base", "64px:4", "--memory-gib", "9"), "only it takes one"),
    ):
        with pytest.raises(SystemExit):
            run(*argv)
        assert words in capsys.readouterr().err
    run("--memory-gib", "64", "--max-batch", "1")
    assert parse_config(TrainConfig, PARTS, [str(tmp_path / "out.py")]).bucket_config["64px"][4] == (1.0, 1)
    with pytest.raises(SystemExit):
        run("--memory-gib", "64", "--max-batch", "1")
    assert "there already" in capsys.readouterr().err


@pytest.mark.slow
def test_conditioning_frames_and_the_features_of_their_images_are_made_up():
    path = Path("configs/wan/train/i2v-14b-lora.py").resolve()
    sizes = ("--model.hidden_size=24", "--model.depth=1", "--model.num_heads=2", "--model.ffn_dim=32")
    argv = [
        str(path),
        "--data-path=x",
        "--device=cpu",
        "--compile=False",
        "--lora=None",
        "--frozen-weights=fp32",
        *sizes,
    ]
    trainer = Trainer(parse_config(TrainConfig, PARTS, argv), CPU, NO_LIMITS, encoders=False)
    assert trainer(Clip("", 5, 32, 32, 1), 1).fits
    _, cond = trainer._batch(Clip("", 5, 32, 48, 1), 2, [])
    assert (cond["condition"].shape, cond["image_features"].shape) == ((2, 20, 2, 4, 6), (2, 257, 1280))
