"""Files of Open-Sora 1.0 to 1.2 are configs of this project: what each of them sets is set here, or said."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from opensora.config.load import (
    InferenceConfig,
    TrainConfig,
    VAEInferenceConfig,
    parse_config,
    to_dict,
)
from opensora.config.upgrade import upgrade
from opensora.datasets.buckets.bucket import Buckets
from opensora.registry import MODELS, SCHEDULERS, build_module
from opensora.schedulers.mask_ratios import MaskRatios
from opensora.training.loop import engine_settings
from opensora.utils.errors import UserError
from tests.config.open_sora import COMPONENTS, Facts, all_files, schema_of, write

FILES = all_files()
GIVEN = {"data_path", "dataset.data_path"}  # by the command line
OF_ANOTHER = {
    "load_text_features",
    "load_video_features",
    "mixed_image_ratio",
    "use_real_rec_loss",
}  # key, which is noted


def parse_as_its_script(name: str, facts: Facts, path: Path, *argv: str):
    data = [] if schema_of(name) is InferenceConfig else ["--data-path", "clips.csv"]
    return parse_config(schema_of(name), COMPONENTS, [write(facts, path), *data, *argv])


@pytest.fixture
def parse(tmp_path):
    """Parse the facts of a file, with changes and a command line, as its script does."""

    def parse(name: str, *argv: str, without: tuple[str, ...] = (), **changes):
        facts = {key: value for key, value in (FILES[name] | changes).items() if key not in without}
        return parse_as_its_script(name, facts, tmp_path / "original.py", *argv)

    return parse


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """Of each file the config, and what was noted."""
    path, heard = tmp_path_factory.mktemp("original") / "original.py", Heard()
    logger = logging.getLogger("opensora.config.resolve")
    logger.addHandler(heard)
    try:
        return {name: (parse_as_its_script(name, facts, path), heard.taken()) for name, facts in FILES.items()}
    finally:
        logger.removeHandler(heard)


class Heard(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def taken(self) -> str:
        text, self.messages = "\n".join(self.messages), []
        return text


def flat(values: Facts) -> Facts:
    """Each value under its name, those of a component under `component.key`; as JSON has them, without None."""
    found: Facts = {}
    for name, value in json.loads(json.dumps(values)).items():
        items = value if isinstance(value, dict) and name != "bucket_config" else {"": value}
        found |= {f"{name}.{key}".strip("."): item for key, item in items.items() if item not in (None, [None, None])}
    return found


def test_there_are_as_many_files_as_there():
    assert [sum(name.startswith(release) for name in FILES) for release in ("1.0", "1.1", "1.2")] == [23, 33, 56]


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_sets_is_set_or_noted(parsed, name):
    cfg, notes = parsed[name]
    facts = {
        "vae" if "/vae/" in name and key == "model" else key: upgrade(key, value) for key, value in FILES[name].items()
    }
    if schema_of(name) is VAEInferenceConfig:
        del facts["dataset"]  # its keys are fields
    before, after = flat(facts), flat(to_dict(cfg))
    changed = {key for key, value in before.items() if after.get(key) != value} - GIVEN
    words = set(re.split(r"[ ,:=]+", notes))
    assert {
        key for key in changed if before[key] is not False and not {key, key.split(".")[0], str(before[key])} & words
    } == set()


def test_what_the_files_build(parsed):
    """Components, masks and buckets, each once; weights and encoders are not asked for."""
    done: set[str] = set()
    for name, (cfg, _) in parsed.items():
        if "/vae/" in name:
            continue
        text = cfg.text_encoder
        width, length = {"t5": (4096, text.get("model_max_length")), "clip": (512, 1), "classes": (1, 1)}[text["type"]]
        model = {**cfg.model, "from_pretrained": None, "depth": 2}
        if (key := repr((model, width, length))) not in done:
            with torch.device("meta"):
                build_module(model, MODELS, in_channels=4, caption_channels=width, model_max_length=length)
        if repr(cfg.scheduler) not in done:
            build_module(cfg.scheduler, SCHEDULERS)
        done |= {key, repr(cfg.scheduler)}
        if isinstance(cfg, TrainConfig):
            MaskRatios(cfg.mask_ratios)
            if cfg.bucket_config is not None:
                Buckets(cfg.bucket_config, 16)


def test_masks_keep_their_meaning(parse, caplog):
    assert parse("1.1/opensora-v1-1/train/stage1").mask_ratios["image_head_tail"] == 0.05
    assert parse("1.1/opensora-v1-1/train/stage1").mask_ratios["identity"] == 0.75
    assert parse("1.2/opensora-v1-2/train/stage1").mask_ratios["interpolate"] == 0.01
    assert "mask_ratios" not in caplog.text
    old = parse("1.1/opensora/train/16x256x256-mask").mask_ratios
    assert old == {
        "identity": 0.7,
        "random": 0.15,
        "quarter_head": 0.05,
        "quarter_tail": 0.05,
        "quarter_head_tail": 0.05,
    }
    assert "mask_head, mask_tail, mask_head_tail" in caplog.text


def test_buckets_of_a_search_and_of_an_evaluation(parse, caplog):
    assert parse("1.2/opensora-v1-2/misc/bs").bucket_config["240p"] == {1: (1.0, 297), 51: (1.0, 20)}
    assert parse("1.2/opensora-v1-2/misc/bs").bucket_config["512"] == {408: (1.0, 1)}
    assert parse("1.1/opensora-v1-1/train/benchmark").bucket_config["720p"] == {
        1: (1.0, 40),
        32: (0.5, 4),
        64: (0.5, 1),
    }
    assert parse("1.2/opensora-v1-2/misc/eval_loss").bucket_config["144p"] == {1: (1.0, 100), 408: (1.0, 4)}
    assert "--goal even" in caplog.text
    caplog.clear()
    assert parse("1.2/opensora-v1-2/misc/eval_loss").val_num_timesteps == 10
    assert caplog.text.count("val_num_timesteps=10") == 1
    found = {"144p": {1: (1.0, 25), 51: (0.0, None)}}  # what a search writes starts from its config
    assert parse("1.2/opensora-v1-2/misc/bs", bucket_config=found).bucket_config == found


def test_buckets_of_another_dataset_were_never_used(parse, caplog):
    cfg = parse("1.2/opensora-v1-1/train/image_rflow")
    assert (cfg.bucket_config, cfg.batch_size, cfg.num_frames, cfg.image_size) == (None, 100, 1, (256, 256))
    assert "bucket_config has no effect with a VideoTextDataset" in caplog.text


def test_stored_features(parse, caplog, tmp_path):
    name = "1.2/opensora-v1-2/train/stage1_feat"
    cfg = parse(name, "--dataset.cache_dir", "features")
    assert (cfg.dataset["type"], cfg.dataset["cache_dir"]) == ("CachedVideoTextDataset", "features")
    assert (cfg.dataset["content"], cfg.dataset["text"]) == ("samples", "features")
    assert (cfg.vae["type"], cfg.text_encoder["model_max_length"]) == ("OpenSoraVAE_V1_2", 300)
    assert "tools.cache_features" in caplog.text
    for file, message in (("0.bin", "bin are not read"), ("clips/METADATA", "--dataset.cache_dir")):
        folder = tmp_path / file[0]
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
        with pytest.raises(UserError, match=message):
            parse_config(TrainConfig, COMPONENTS, [write(FILES[name], tmp_path / "f.py"), "--data-path", str(folder)])


def test_the_loss_of_a_vae(parse, caplog):
    """Sums over the pixels of a frame and over the latents of a sample, 4 x 5 x 32 x 32 of 17 frames, become means."""
    cfg = parse("1.2/vae/train/stage1")
    assert cfg.loss == {
        "l1": 1.0,
        "mse": 0.0,
        "pooled": 0.0,
        "lpips": 0.1,
        "kl": pytest.approx(1e-6 * 4 * 5 * 32 * 32 / (3 * 256 * 256)),
    }
    assert cfg.vae["vae_2d"]["scaling_factor"] == 0.18215
    assert "use_real_rec_loss" not in caplog.text  # it is False there, which is said by nothing
    assert (cfg.mixed_lengths.count(1), cfg.mixed_lengths.count(17)) == (1, 4)
    assert parse("1.2/vae/train/stage3").mixed_lengths == [*range(1, 34)]
    assert "use_z_rec_loss, use_image_identity_loss: the loss is on pixels" in caplog.text
    assert parse("1.2/vae/train/stage1", mixed_image_ratio=0.25).mixed_lengths == [17, 17, 17, 1]
    with pytest.raises(UserError, match="mixed_strategy='frames' is not known"):
        parse("1.2/vae/train/stage1", mixed_strategy="frames")


def test_the_gan_of_a_vae(parse, caplog):
    gan = {"discriminator_start": 50001, "generator_factor": 0.25, "discriminator_factor": 2}
    cfg = parse("1.2/vae/train/stage3", discriminator={"type": "PatchDiscriminator"}, lecam_loss_weight=0.1, **gan)
    assert (cfg.adversarial_start, cfg.adversarial_weight) == (50001, 0.5)
    assert "lecam_loss_weight" in caplog.text
    assert parse("1.2/vae/train/stage3", discriminator={"type": "PatchDiscriminator"}).adversarial_weight == 0.5
    assert parse("1.2/vae/train/stage3", **gan).discriminator is None
    with pytest.raises(UserError, match="generator_loss_type='vanilla': the GAN's loss is 'hinge' here"):
        parse("1.2/vae/train/stage3", generator_loss_type="vanilla")


def test_a_vae_looks_at_the_first_rows(parse):
    cfg = parse("1.2/vae/inference/video", without=("num_frames",))
    assert (cfg.num_frames, cfg.image_size, cfg.data_path, cfg.num_samples) == (17, (256, 256), "clips.csv", 100)
    assert parse("1.2/vae/inference/video", "--ckpt-path", "w").vae["from_pretrained"] == "w"


def test_a_mistake_in_the_model_of_a_vae_names_its_line(parse):
    model = FILES["1.2/vae/train/stage1"]["model"] | {"frozen": True}
    with pytest.raises(UserError, match=r"takes no argument 'frozen'.*original\.py:\d+\)"):
        parse("1.2/vae/train/stage1", model=model)


def test_where_a_translated_value_comes_from(parse, capsys):
    with pytest.raises(SystemExit):
        parse("1.2/vae/train/stage1", "--print-config")
    printed = capsys.readouterr().out
    assert re.search(r"^loss.lpips = 0.1 +# from Open-Sora's keys, see the notes$", printed, re.MULTILINE)
    assert re.search(r"^vae.freeze_vae_2d = True +# .*original\.py:\d+$", printed, re.MULTILINE)


def test_what_an_engine_does_not_take_is_noted_and_not_given_to_it(parse, caplog):
    cfg = parse("1.0/opensora/train/16x256x256", hybrid_zero=True, optimizer_offload=True, shard_size=2)
    assert caplog.text.count("has no effect with plugin='zero2'") == 3
    assert engine_settings(cfg) == {"dtype": "bf16", "grad_clip": 1.0}


@pytest.mark.parametrize("key", ["bin_sizes", "batchsize_of_images", "base_steps", "grad_checkpointing_of_the_vae"])
def test_a_hint_is_near(parse, key):
    with pytest.raises(UserError, match=f"'{key}' is not a field of TrainConfig") as error:
        parse("1.0/dit/train/1x256x256", **{key: 1})
    assert "Did you mean" not in str(error.value)


def test_the_file_of_another_script_is_named(tmp_path):
    with pytest.raises(UserError, match=r"this is a config for scripts/inference\.py"):
        parse_config(TrainConfig, COMPONENTS, [write(FILES["1.0/opensora/inference/16x256x256"], tmp_path / "c.py")])
