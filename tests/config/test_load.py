"""What a config file and a command line may set, and how mistakes in them are reported."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, Literal

import pytest

from opensora.config.command_line import read_command
from opensora.config.load import (
    InferenceConfig,
    TrainConfig,
    VAETrainConfig,
    changed_settings,
    config_from_dict,
    parse_config,
    to_dict,
)
from opensora.config.resolve import SCRIPTS, wrong_type
from opensora.config.schema import REQUIRED, coerce, members, schema_fields
from opensora.config.upgrade import upgrade
from opensora.registry import MODELS, SCHEDULERS, Registry
from opensora.utils.dtype import DTYPES
from opensora.utils.errors import UserError
from opensora.utils.folders import REPOSITORY

PARTS = Registry("part")
DATA = Registry("dataset")


@PARTS.register_module(name="XL/2")
class Denoiser:
    def __init__(
        self,
        depth=28,
        space_scale=1.0,
        enable_flash_attn=None,
        enable_layernorm_kernel=False,
        from_pretrained=None,
        input_size=None,
        label="text",
        only_train_temporal=False,
    ):
        pass


@PARTS.register_module(name="vae")
class VAE:
    def __init__(self, from_pretrained=None, micro_batch_size=None):
        pass


@PARTS.register_module(name="t5")
class T5:
    def __init__(self, model_max_length=120, shardformer=False):
        pass


@PARTS.register_module(name="iddpm")
class IDDPM:
    def __init__(self, num_sampling_steps=None, cfg_scale=4.0, cfg_channel=None, timestep_respacing=None):
        pass


@DATA.register_module(name="VideoTextDataset")
class Videos:
    def __init__(self, data_path, root=None, num_frames=16, frame_interval=1, image_size=(256, 256), text_columns=()):
        pass


@DATA.register_module(name="VariableVideoTextDataset")
class InBuckets:
    def __init__(self, data_path, bucket_config, root=None, frame_interval=1):
        pass


@DATA.register_module(name="Synthetic")
class Synthetic:
    def __init__(self, length=8, num_frames=16):
        pass


REGISTRIES = {"model": PARTS, "vae": PARTS, "text_encoder": PARTS, "scheduler": PARTS, "dataset": DATA}

COMPONENTS = """
model = dict(type="XL/2", depth=4, from_pretrained="weights.pth")
vae = dict(type="vae")
text_encoder = dict(type="t5", model_max_length=120)
scheduler = dict(type="iddpm", cfg_scale=7.0)
"""
TRAIN = COMPONENTS + 'data_path = "clips.csv"\n'
INFERENCE = COMPONENTS + "num_frames = 16\nfps = 24 // 3\nimage_size = (256, 256)\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def train(write):
    """Parse a training config made of `extra` lines and a command line."""

    def parse(*argv, extra="", text=TRAIN):
        return parse_config(TrainConfig, REGISTRIES, [write(text + extra), *argv])

    return parse


@pytest.fixture
def infer(write):
    def parse(*argv, extra=""):
        return parse_config(InferenceConfig, REGISTRIES, [write(INFERENCE + extra), *argv])

    return parse


@pytest.mark.parametrize(
    ("argv", "lora", "scale"),
    [
        (("--lora", "a", "--lora-scale", "0.5"), "a", 0.5),
        (("--lora-scale", "1", "-0.5", "--lora", "a", "b"), ["a", "b"], [1.0, -0.5]),
        (("--lora.high", "a", "--lora.low", "b"), {"high": "a", "low": "b"}, 1.0),
    ],
)
def test_loras_on_the_command_line(infer, write, argv, lora, scale):
    cfg = infer(*argv)
    assert (cfg.lora, cfg.lora_scale) == (lora, scale)
    cfg = parse_config(InferenceConfig, REGISTRIES, [*argv, write(INFERENCE)])  # the config comes last
    assert (cfg.lora, cfg.lora_scale) == (lora, scale)


def complaint(parse, *argv, **kwargs):
    with pytest.raises(UserError) as caught:
        parse(*argv, **kwargs)
    return str(caught.value)


# --- files


def test_a_file_gives_values_and_the_schema_gives_the_rest(train):
    cfg = train(extra="num_frames = 64\nimage_size = (512, 256)\nlr = 1e-4")
    assert (cfg.num_frames, cfg.image_size, cfg.lr) == (64, (512, 256), 1e-4)
    assert (cfg.seed, cfg.dtype, cfg.plugin, cfg.ema_decay, cfg.adam_betas) == (
        42,
        "bf16",
        "ddp",
        0.9999,
        (0.9, 0.999),
    )
    assert cfg.model == {"type": "XL/2", "depth": 4, "from_pretrained": "weights.pth"}
    assert type(cfg.model) is dict


def test_a_config_cannot_be_changed_after_it_was_checked(train):
    with pytest.raises(FrozenInstanceError):
        train().lr = 1.0


def test_private_names_and_imported_modules_are_ignored(train):
    assert train(extra="import math\n_size = 2**5\nimage_size = (_size, math.floor(64.5))").image_size == (32, 64)


def test_other_names_are_not_ignored(train):
    text = complaint(train, extra="num_frame = 3\nfrom math import pi\ndef lr(): return 1\nseed = lambda: 2")
    assert "'num_frame' is not a field of TrainConfig. Did you mean 'num_frames'?" in text
    assert "'pi' is not a field" in text
    assert "'lr' is a function" in text
    assert "'seed' is a function" in text
    assert "config.py:" in text


def test_a_base_file_is_overridden_key_by_key(write):
    write(TRAIN + "num_frames = 8\nlr = 1e-3", "base.py")
    child = write('_base_ = ["base.py"]\nlr = 5e-4\nmodel = dict(depth=2)', "child.py")
    cfg = parse_config(TrainConfig, REGISTRIES, [child])
    assert (cfg.num_frames, cfg.lr, cfg.model["depth"], cfg.model["type"]) == (8, 5e-4, 2, "XL/2")


def test_a_file_reads_a_variable_of_its_base(write):
    write(TRAIN, "base.py")
    child = write('_base_ = "base.py"\nvae = _base_.vae\nscheduler = dict(_delete_=True, type="iddpm")', "child.py")
    cfg = parse_config(TrainConfig, REGISTRIES, [child])
    assert cfg.vae == {"type": "vae"}
    assert cfg.scheduler == {"type": "iddpm"}


def test_a_missing_file_is_named_with_its_neighbour(write):
    write(TRAIN, "16x256x256.py")
    path = write("", "other.py").replace("other", "16x256x25")
    with pytest.raises(UserError, match=r"16x256x25.py does not exist. Did you mean '16x256x256.py'"):
        parse_config(TrainConfig, REGISTRIES, [path])


SHIPPED = "configs/quickstart/inference.py"


def test_a_config_of_the_project_is_found_from_any_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    cfg = parse_config(InferenceConfig, argv=[SHIPPED, "--save-dir", "assets/texts", "--lora", "assets/models/mine"])
    for path in (cfg.prompt_path, cfg.model["from_pretrained"], cfg.vae["from_pretrained"]):
        assert path == str(REPOSITORY / path)
        assert Path(path).exists()
    assert (cfg.save_dir, cfg.lora) == ("assets/texts", "assets/models/mine")
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [f" {SHIPPED} is not in {tmp_path}"]
    assert config_from_dict(InferenceConfig, {**to_dict(cfg), "prompt_path": "assets/texts/quickstart.txt"}) == cfg


def test_a_file_of_ones_own_comes_before_one_of_the_project(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / SHIPPED).parent.mkdir(parents=True)
    (tmp_path / SHIPPED).write_text((REPOSITORY / SHIPPED).read_text())
    (tmp_path / "assets/texts").mkdir(parents=True)
    (tmp_path / "assets/texts/quickstart.txt").touch()
    assert parse_config(InferenceConfig, argv=[SHIPPED]).prompt_path == "./assets/texts/quickstart.txt"
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("configs/opensora/inference/16x256x25.py", "Did you mean 'configs/opensora/inference/16x256x256.py'?"),
        ("held_out.py", "There are configs/quickstart/held_out.py."),
    ],
)
def test_a_missing_file_is_named_with_those_of_the_project(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{re.escape(name)} does not exist\. {re.escape(hint)}"):
        parse_config(InferenceConfig, argv=[name])


def test_a_config_that_is_no_regular_file_is_not_called_missing(tmp_path):
    (tmp_path / "config.py").mkdir()
    with pytest.raises(UserError, match=r"config.py is a folder or a device, not a regular file"):
        parse_config(TrainConfig, REGISTRIES, [str(tmp_path / "config.py")])


def test_a_missing_base_file_is_named(write):
    with pytest.raises(UserError, match=r"nowhere\.py does not exist"):
        parse_config(TrainConfig, REGISTRIES, [write('_base_ = "nowhere.py"')])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr = 1\nmodel = dict(", "config.py:2"),
        ("lr = 1\n\nseed = undefined_name", "config.py:3: NameError"),
        ("lr = 1\nseed = 1 / 0", "config.py:2: ZeroDivisionError"),
        ("filename = 3", "'filename' is not a field"),
        ("lr = 1\nimport sys\nsys.exit(0)", "config.py:3: SystemExit: 0"),
        (
            'lr = 1\nmodel = dict(type="XL/2")\nmodel["me"] = model',
            "config.py cannot be read as plain data .*contains itself",
        ),
        ("lr = 1\nimage_size = (size for size in (1, 2))", "config.py cannot be read as plain data .*a generator"),
        ("model = " + 300 * "[" + 300 * "]", r"config.py:1: too many nested parentheses: model = \[{192}$"),
    ],
)
def test_a_broken_file_is_reported_with_its_line(write, text, expected):
    with pytest.raises(UserError, match=expected):
        parse_config(TrainConfig, REGISTRIES, [write(text)])


@pytest.mark.parametrize("names", [["a.py"], ["a.py", "b.py"], ["a.py", "b.py", "c.py"]])
def test_bases_that_lead_in_a_circle_are_named(write, tmp_path, names):
    for name, base in zip(names, [*names[1:], f"../{tmp_path.name}/{names[0]}"], strict=True):
        write(f'_base_ = "{base}"', name)
    circle = " -> ".join(str(tmp_path / name) for name in [*names, f"../{tmp_path.name}/{names[0]}"])
    with pytest.raises(UserError, match=f"^_base_ leads in a circle: {re.escape(circle)}; remove one of them"):
        parse_config(TrainConfig, REGISTRIES, [str(tmp_path / "a.py")])


def test_two_bases_may_share_one_and_may_not_set_one_name(write):
    write("lr = 1e-3\n_depth = 2", "root.py")
    write('"""A."""\n_base_ = "root.py"\nseed = 3', "a.py")
    write('"""B."""\n' + TRAIN.replace("depth=4", "depth=3"), "b.py")
    child = write('_base_ = ["a.py", "b.py"]\nmodel = dict(depth=_base_._depth)\nvae = {{ _base_.vae }}', "child.py")
    cfg = parse_config(TrainConfig, REGISTRIES, [child])
    assert (cfg.lr, cfg.seed, cfg.vae, cfg.model["depth"]) == (1e-3, 3, {"type": "vae"}, 2)
    write("lr = 2e-3", "b.py")
    with pytest.raises(UserError, match=r"child.py: two of its _base_ files set lr; keep one"):
        parse_config(TrainConfig, REGISTRIES, [child])


def test_a_base_is_run_once_and_keeps_its_values(write, tmp_path):
    write(TRAIN + f"_ = open({str(tmp_path / 'ran')!r}, 'a').write('x')\n", "base.py")
    child = write('_base_ = "base.py"\n_vae = _base_.vae\n_vae["micro_batch_size"] = 2', "child.py")
    assert parse_config(TrainConfig, REGISTRIES, [child]).vae == {"type": "vae"}
    assert (tmp_path / "ran").read_text() == "x"


@pytest.mark.parametrize("name", ["config.py", "base.py", "config.json", "config.yml", "deepspeed.json"])
def test_a_byte_order_mark_is_no_part_of_a_file(write, tmp_path, name):
    """Editors of Windows write one."""
    write(TRAIN, "base.py")
    write('_base_ = "base.py"\nlr = 5e-4', "config.py")
    values = {"lr": 5e-4, "data_path": "a.csv", "model": {"type": "XL/2"}, "scheduler": {"type": "iddpm"}}
    write(json.dumps(values | {"vae": {"type": "vae"}, "text_encoder": {"type": "t5"}}), "config.json")
    write("SOLVER: {BASE_LR: 5e-4}\nMODEL: {WEIGHTS: w, CONFIG: {arch: [vit_d1w64, vit_d1w64, mlp_d1w64]}}\nTRAIN: {DATASET: d}"
          "\nPIPELINE: {TYPE: nova_train_t2i}", "config.yml")  # fmt: skip
    write('{"gradient_clipping": 2}', "deepspeed.json")
    (tmp_path / name).write_text("\ufeff" + (tmp_path / name).read_text(), encoding="utf-8")
    config = "config.py" if name in ("base.py", "deepspeed.json") else name
    flags = ["--deepspeed", str(tmp_path / name)] if name == "deepspeed.json" else []
    cfg = parse_config(TrainConfig, REGISTRIES if config != "config.yml" else None, [str(tmp_path / config), *flags])
    assert (cfg.lr, cfg.grad_clip == 2.0) == (5e-4, bool(flags))


@pytest.mark.parametrize("name", ["config.json", "config.yml"])
def test_a_data_file_runs_nothing(write, tmp_path, name):
    """Neither by `_base_`, nor by `imports`, unless the user names them."""
    ran = tmp_path / "ran"
    write(TRAIN + f"_ = open({str(ran)!r}, 'w')", "base.py")
    with pytest.raises(UserError, match=r"no _base_; write a .py file|_base_ is not a key of this config"):
        parse_config(TrainConfig, REGISTRIES, [write('{"_base_": "base.py"}', name)])
    assert not ran.exists()


def test_imports_of_a_data_file_are_named_and_not_run(write, tmp_path):
    ran = tmp_path / "ran"
    part = write(f"open({str(ran)!r}, 'w').close()", "part.py")
    values = {"lr": 5e-4, "data_path": "a.csv", "model": {"type": "XL/2"}, "scheduler": {"type": "iddpm"}}
    config = write(
        json.dumps(values | {"vae": {"type": "vae"}, "text_encoder": {"type": "t5"}, "imports": [part]}), "c.json"
    )
    with pytest.raises(
        UserError, match=rf"names parts from {re.escape(part)}, .* or --imports {re.escape(part)} where"
    ):
        parse_config(TrainConfig, REGISTRIES, [config])
    assert not ran.exists()
    assert parse_config(TrainConfig, REGISTRIES, [config, "--imports", part]).imports == [part]
    assert ran.exists()
    write(json.dumps(values | {"imports": 3}), "c.json")
    with pytest.raises(UserError, match="imports=3: expected"):
        parse_config(TrainConfig, REGISTRIES, [config])


def test_a_broken_base_file_is_reported_with_its_line(write):
    write("seed = (", "base.py")
    with pytest.raises(UserError, match=r"base.py:1"):
        parse_config(TrainConfig, REGISTRIES, [write('_base_ = "base.py"')])


def test_other_kinds_of_files_are_refused(write):
    with pytest.raises(UserError, match=r"expected a \.py file"):
        parse_config(TrainConfig, REGISTRIES, [write("lr = 1", "config.toml")])
    with pytest.raises(
        UserError, match=r"lr is not a key of this config. A YAML config is one of NOVA's guide \(PIPELINE, "
    ):
        parse_config(TrainConfig, REGISTRIES, [write("lr: 1", "config.yaml")])


def test_a_config_cannot_read_the_environment_or_import_modules(train, monkeypatch):
    monkeypatch.setenv("LR", "7")
    assert "is not a field" in complaint(train, extra='custom_imports = dict(imports=["nothing_of_that_name"])')
    complaint(train, extra="lr = {{$LR:1.0}}")


def test_values_must_be_plain_data(train):
    text = complaint(train, extra='model = dict(type="XL/2", label=[object])')
    assert "model holds what is no plain data: Object of type type" in text


# --- types


def test_near_types_are_taken(train):
    cfg = train(extra="lr = 1\nimage_size = [64, 32]\ngrad_clip = 0")
    assert (cfg.lr, cfg.image_size, cfg.grad_clip) == (1.0, (64, 32), 0.0)
    assert type(cfg.lr) is float


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            'lr = "abc"',
            "lr='abc': expected float. (",
        ),
        ("lr = True", "lr=True: expected float"),
        ("lr = float('nan')", "lr=nan: expected float"),
        ("num_frames = 16.0", "num_frames=16.0: expected int"),
        ("num_frames = True", "num_frames=True: expected int"),
        ("wandb = 1", "wandb=1: expected bool"),
        ("image_size = 256", "image_size=256: expected (int, int)"),
        ("image_size = (1, 2, 3)", "image_size=(1, 2, 3): expected (int, int)"),
        ('lr_schedule = "linear"', "lr_schedule='linear': expected 'constant' or 'cosine'"),
        ('plugin = "zero3"', "plugin='zero3': expected 'ddp' or 'fsdp2' or 'zero2' or 'zero2-seq'"),
        ('device = "tpu"', "device='tpu': expected 'auto' or 'cpu' or 'cuda'"),
        ("load = 3", "load=3: expected str or None"),
        ("model = None", "model=None: expected dict(type=NAME, ...)"),
        ('dataset = "VideoTextDataset"', "dataset='VideoTextDataset': expected dict(type=NAME, ...)"),
        ('dtype = "fp8"', "dtype='fp8': must be one of fp32,"),
        ('dtype = "bfloat1"', "Did you mean 'bfloat16'?"),
        ("batch_size = 0", "batch_size=0: must be at least 1"),
        ("lr = 0", "lr=0.0: must be greater than 0"),
        ("ema_decay = 1.0", "ema_decay=1.0: must be at least 0 and less than 1"),
        ("ema_decay = -0.1", "ema_decay=-0.1: must be at least 0"),
        ("adam_betas = (0.9, 1.0)", "adam_betas=(0.9, 1.0): must be at least 0 and less than 1"),
        ("image_size = (0, 64)", "image_size=(0, 64): must be at least 1"),
        ("num_frames = 0", "num_frames=0: must be at least 1"),
        ("warmup_steps = -1", "warmup_steps=-1: must be at least 0"),
        ("sp_size = 0", "sp_size=0: must be at least 1"),
        ('bucket_config = {"256": {1: (1.0, 4)}}', "bucket_config has no effect"),
    ],
)
def test_a_wrong_value_is_reported_with_field_value_expectation_and_origin(train, line, expected):
    assert expected in complaint(train, extra=line)


@pytest.mark.parametrize(
    ("line", "flag", "expected"),
    [
        ("start_from_scratch = True", "--start-from-scratch", "start_from_scratch=True has no effect without load"),
        (
            "use_image_transform = True",
            "--use-image-transform",
            "True has no effect: VideoTextDataset does not take it",
        ),
        ("cast_once = True", "--cast-once", "it gained less than 3 % of a step"),
        ("lora = dict()\nmodel['only_train_temporal'] = True", "--model.only_train_temporal", "no effect with lora"),
    ],
)
def test_what_changes_no_result_is_a_note_in_a_file_and_an_error_when_typed(
    train, caplog, monkeypatch, line, flag, expected
):
    cfg = train(extra=line)
    assert caplog.text.count(expected) == 1
    assert "config.py:" in caplog.text
    config_from_dict(TrainConfig, to_dict(cfg), {})  # a run's own record of its settings
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    train(extra=line)
    assert not caplog.records  # the main process has said it
    extra = line.replace("\nmodel['only_train_temporal'] = True", "") if "\n" in line else ""
    text = complaint(train, flag, "True", extra=extra)
    assert expected in text
    assert "command line" in text or flag == "--cast-once"


def test_the_origin_is_file_and_line(train):
    line = (TRAIN + "lr = 'abc'").splitlines().index("lr = 'abc'") + 1
    assert f"config.py:{line})" in complaint(train, extra="lr = 'abc'")


def test_a_required_field_is_missed(train):
    text = complaint(train, text='data_path = "x"\nvae = dict(type="vae")\n')
    assert "model is missing; expected dict(type=NAME, ...): denoiser component." in text
    assert "scheduler is missing" in text


def test_all_problems_are_reported_at_once(train):
    text = complaint(
        train,
        "--model.depht",
        "2",
        "--numframes",
        "3",
        "--seed",
        "x",
        extra='lr = "abc"\nbatch_size = 0\nwarp = 9\nscheduler = dict(type="idpm")',
    )
    assert text.startswith("7 problems in the config:\n  1. ")
    for word in ("depht", "numframes", "--seed", "lr='abc'", "batch_size=0", "warp", "'idpm'"):
        assert word in text


def test_a_file_for_another_script_is_one_problem(train, infer):
    message = complaint(infer, extra="lr = 1e-4\nepochs = 2\ngrad_clip = 1.0\n")
    assert message.startswith("this is a config for scripts/train.py: 'lr', 'epochs', 'grad_clip' and"), message
    assert "problems" not in message
    assert "'lr' is not a field of InferenceConfig" in complaint(
        infer, extra="lr = 1e-4\nepochs = 2\n"
    )  # two may be slips
    extra = "lr = 1e-4\nepochs = 2\ngrad_clip = 1.0\nepohcs = 3\n"
    assert "'epohcs' is not a field" in complaint(infer, extra=extra)  # nobody's
    assert "a config for scripts/inference.py" in complaint(train, extra="fps = 8\nprompt = 'a'\nsave_dir = '.'\n")


def test_inference_fields(infer):
    cfg = infer(extra="save_fps = 12.5")
    assert (cfg.fps, cfg.save_fps, cfg.save_dir, cfg.num_sample, cfg.verbose) == (8, 12.5, "./samples", 1, 1)
    assert type(cfg.fps) is int
    assert "fps=0: must be greater than 0" in complaint(infer, extra="fps = 0")
    assert "leave no prompt" in complaint(infer, "--start-index", "3", "--end-index", "3")


def test_a_prompt_in_a_file_is_a_list_and_not_a_string_of_letters(infer):
    assert "prompt='a lake': expected list of str or None" in complaint(infer, extra='prompt = "a lake"')


def test_vae_training_names_its_loss_terms(write):
    def parse(*argv, extra=""):
        text = 'vae = dict(type="vae")\ndata_path = "x.csv"\n' + extra
        return parse_config(VAETrainConfig, REGISTRIES, [write(text), *argv])

    assert parse(extra="loss = dict(l1=1, kl=1e-6)").loss == {"l1": 1.0, "kl": 1e-6, "mse": 0, "pooled": 0, "lpips": 0}
    assert parse("--loss.kl", "1e-3").loss["kl"] == 1e-3
    assert parse("--loss.kl", "1e-3").loss["l1"] == parse().loss["l1"]
    assert parse("--ckpt-path", "w").vae["from_pretrained"] == "w"
    assert "loss has no term 'lpip'. Did you mean 'lpips'?" in complaint(parse, extra="loss = dict(lpip=1)")
    assert "loss.kl=-1.0: must be at least 0" in complaint(parse, "--loss.kl", "-1")
    assert "every weight is 0" in complaint(parse, extra="loss = {}")


# --- components


def test_an_unknown_type_is_reported_with_its_neighbour(train):
    text = complaint(train, "--model.type", "XL/3")
    assert "'XL/3' is not a registered part. Did you mean 'XL/2'?" in text
    assert "command line --model.type" in text


def test_an_unknown_argument_is_reported_with_its_neighbour_and_origin(train):
    assert "takes no argument 'depht'. Did you mean 'depth'?" in complaint(train, "--model.depht", "2")
    assert "(command line --model.depht)" in complaint(train, "--model.depht", "2")
    assert "config.py:" in complaint(train, extra='vae = dict(type="vae", micro_batch=1)')


def test_a_component_without_type_is_reported(train):
    assert "expected dict(type=NAME, ...)" in complaint(train, extra="vae = dict(micro_batch_size=1)")


def test_without_registries_components_are_not_looked_into(write):
    cfg = parse_config(TrainConfig, None, [write(TRAIN), "--model.anything", "3"])
    assert cfg.model["anything"] == 3


def test_the_older_spelling_of_flash_attention(train):
    assert train(extra="model = dict(type='XL/2', enable_flashattn=True)").model["enable_flash_attn"] is True
    assert "enable_flashattn" not in train("--model.enable-flashattn", "False").model
    both = "model = dict(type='XL/2', enable_flashattn=True, enable_flash_attn={})"
    assert train(extra=both.format(True)).model["enable_flash_attn"] is True
    assert "are one setting" in complaint(train, extra=both.format(False))
    assert train("--model.enable_flashattn", "no", extra=both.format(True)).model["enable_flash_attn"] is False


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "iddpm", "learn_sigma": True}, {"variance": "learned_range"}),
        ({"type": "iddpm", "learn_sigma": False}, {"variance": "fixed_large"}),
        ({"type": "iddpm", "learn_sigma": False, "sigma_small": True}, {"variance": "fixed_small"}),
        ({"type": "iddpm", "sigma_small": False}, {"variance": "learned_range"}),
        ({"type": "iddpm", "learn_sigma": False, "variance": "fixed_small"}, {"variance": "fixed_small"}),
        ({"type": "iddpm", "variance": None, "prediction": None, "loss": None, "timestep_sampling": None}, {}),
        ({"type": "iddpm", "predict_xstart": True}, {"prediction": "x0"}),
        ({"type": "iddpm", "predict_xstart": False}, {"prediction": "eps"}),
        ({"type": "iddpm", "predict_xstart": False, "prediction": "v"}, {"prediction": "v"}),
        ({"type": "iddpm", "use_kl": True}, {"loss": "rescaled_kl"}),
        ({"type": "iddpm", "use_kl": True, "rescale_learned_sigmas": False}, {"loss": "rescaled_kl"}),
        ({"type": "iddpm", "use_kl": True, "loss": "kl"}, {"loss": "kl"}),
        ({"type": "iddpm", "use_kl": False, "rescale_learned_sigmas": True}, {"loss": "rescaled_mse"}),
        ({"type": "iddpm", "rescale_learned_sigmas": False}, {"loss": "mse"}),
        ({"type": "iddpm", "faster": True}, {"timestep_sampling": "speedit"}),
        (
            {"type": "iddpm", "faster": True, "timestep_sampling": {"type": "speed"}},
            {"timestep_sampling": {"type": "speed"}},
        ),
        ({"type": "iddpm", "faster": False}, {"timestep_sampling": "uniform"}),
        ({"type": "iddpm", "noise_schedule": "cosine", "use_kl": None}, {"noise_schedule": "squaredcos_cap_v2"}),
        ({"type": "dpm-solver", "noise_schedule": "cosine"}, {"noise_schedule": "squaredcos_cap_v2"}),
        ({"type": "dpm-solver", "thresholding": "none", "thresholding_max": None}, {}),
        ({"type": "rflow", "shift": None, "time": None, "timestep_sampling": None}, {}),
        ({"type": "rflow", "use_timestep_transform": True}, {"shift": "resolution"}),
        ({"type": "rflow", "use_timestep_transform": True, "shift": "length"}, {"shift": "length"}),
        ({"type": "rflow", "use_timestep_transform": False}, {"shift": "none"}),
        ({"type": "rflow", "use_discrete_timesteps": True}, {"time": "discrete"}),
        ({"type": "rflow", "use_discrete_timesteps": False, "time": "continuous"}, {"time": "continuous"}),
        ({"type": "rflow", "sample_method": "uniform"}, {"timestep_sampling": "uniform"}),
        (
            {"type": "rflow", "sample_method": "logit-normal", "loc": 0.5, "scale": None},
            {"timestep_sampling": {"type": "logit-normal", "loc": 0.5}},
        ),
        ({"type": "nova", "shift": 3.0}, {"shift": 3.0}),
        ({"type": "mine", "noise_schedule": "cosine"}, {"noise_schedule": "cosine"}),
    ],
)
def test_older_spellings_of_schedulers_become_the_current_ones(old, new):
    assert upgrade("scheduler", old) == {"type": old["type"], **new}
    assert upgrade("scheduler", upgrade("scheduler", old)) == upgrade("val_scheduler", old)
    values = to_dict(parse_config(TrainConfig, None, ["configs/quickstart/pretrain.py"])) | {"scheduler": old}
    assert config_from_dict(TrainConfig, values).scheduler == {"type": old["type"], **new}  # of a checkpoint
    assert (
        changed_settings({"scheduler": old}, {"scheduler": {"type": old["type"], **new}}) == []
    )  # a resume, a sidecar
    if old["type"] != "mine":
        SCHEDULERS.build(upgrade("scheduler", old))


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            {"type": "iddpm", "variance": "learned_range", "learn_sigma": False},
            "learn_sigma=False and variance='learned_range' contradict",
        ),
        (
            {"type": "iddpm", "learn_sigma": True, "sigma_small": True},
            "learn_sigma=True and sigma_small=True contradict",
        ),
        ({"type": "iddpm", "loss": "mse", "use_kl": True}, "use_kl=True and loss='mse' contradict"),
        (
            {"type": "iddpm", "faster": True, "timestep_sampling": "uniform"},
            "contradict each other; keep timestep_sampling",
        ),
        ({"type": "iddpm", "faster": False, "timestep_sampling": "speed"}, "contradict"),
        ({"type": "iddpm", "use_kl": "yes"}, "scheduler.use_kl='yes': expected True or False"),
        ({"type": "dpm-solver", "thresholding": "dynamic"}, "thresholding='dynamic' was removed: it is for pixels"),
        ({"type": "rflow", "time": "continuous", "use_discrete_timesteps": True}, "contradict"),
        ({"type": "rflow", "shift": "none", "use_timestep_transform": True}, "contradict"),
        ({"type": "rflow", "shift": 3.0, "use_timestep_transform": False}, "contradict"),
        ({"type": "rflow", "sample_method": "cosmap"}, "sample_method='cosmap' is not one of uniform, logit-normal"),
        ({"type": "rflow", "loc": 1.0}, "no effect with sample_method='uniform'"),
        ({"type": "rflow", "sample_method": "logit-normal", "timestep_sampling": "uniform"}, "sets the same"),
    ],
)
def test_spellings_of_a_scheduler_that_contradict_each_other(train, scheduler, message):
    text = complaint(train, extra=f"scheduler = {scheduler}\nlr = 0")
    assert message in text
    assert text.count(message) == 1
    assert "lr=0.0" in text


def test_an_older_spelling_on_the_command_line_replaces_that_of_the_file(write):
    path = write(TRAIN + "scheduler = dict(type='rflow', use_timestep_transform=True, use_discrete_timesteps=True)")
    for key, value, shift in (("use_timestep_transform", "False", "none"), ("shift", "length", "length")):
        cfg = parse_config(TrainConfig, None, [path, f"--scheduler.{key}", value])
        assert cfg.scheduler == {"type": "rflow", "shift": shift, "time": "discrete"}


@pytest.mark.parametrize("way", ["diffusion.faster=true", "--diffusion.faster", "--scheduler.faster=True"])
def test_speedits_switch_takes_the_place_of_the_files_timesteps_and_weights(write, way):
    own = {"timestep_sampling": {"type": "speed"}, "loss_weighting": "speed"}
    path = write(f"{TRAIN}scheduler = {{'type': 'iddpm', 'timestep_respacing': '250', **{own}}}")
    rest = {"type": "iddpm", "timestep_respacing": "250"}
    assert parse_config(TrainConfig, None, [path]).scheduler == rest | own
    assert parse_config(TrainConfig, None, [path, way]).scheduler == rest | {"timestep_sampling": "speedit"}
    argv = [path, "scheduler.loss_weighting=min-snr", way, "diffusion.timestep_respacing=100"]
    both = {"timestep_sampling": "speedit", "loss_weighting": "min-snr", "timestep_respacing": "100"}
    assert parse_config(TrainConfig, None, argv).scheduler == rest | both


def test_older_names_of_masks(train):
    ratios = "mask_ratios = {'mask_no': 0.5, 'intepolate': 0.25, 'mask_image_head': 0.25}"
    assert train(extra=ratios).mask_ratios == {"identity": 0.5, "interpolate": 0.25, "image_head": 0.25}
    assert "'random' is there twice" in complaint(train, extra="mask_ratios = {'random': 0.1, 'mask_random': 0.1}")


# --- command line


def test_validation_is_switched_off_by_one_word(train):
    extra = "val_every = 5\nval_prompts = ['a']\nval_num_frames = 4\nval_image_size = (16, 16)"
    cfg = train("--val-every", "0", extra=extra)
    assert (cfg.val_every, cfg.val_prompts, cfg.val_num_frames) == (0, None, None)
    assert train(extra=extra.replace("val_every = 5", "val_every = 0")).val_prompts == ["a"]  # and a note
    assert "val_prompts" in complaint(train, "--val-every", "0", "--val-prompts", "a lake", extra=extra)


@pytest.mark.parametrize("whole", ["{'type': 'XL/2', 'space_scale': 0.5}", "dict(type='XL/2', space_scale=0.5)"])
def test_a_key_and_its_component_may_stand_in_any_order(train, whole):
    for argv in (["--model.depth", "2", "--model", whole], ["--model", whole, "--model.depth", "2"]):
        assert train(*argv).model == {"type": "XL/2", "space_scale": 0.5, "depth": 2}
    assert train("--ckpt-path", "w.pt", "--model", whole).model["from_pretrained"] == "w.pt"


def test_a_call_of_anything_but_dict_is_text(train):
    assert "expected" in complaint(train, "--model", "open('x')")
    assert "expected" in complaint(train, "--model", "dict({'type': 'XL/2'})")


def test_lists_of_open_sora_have_none_where_a_prompt_has_none(infer):
    text = "prompt = ['a', 'b']\nreference_path = ['a.png', None]\nmask_strategy = ['0', None]"
    assert infer(extra=text).reference_path == ["a.png", ""]
    assert infer("--reference-path", "None", "b.png", extra=text).reference_path == ["", "b.png"]
    assert infer(extra=text).mask_strategy == ["0", ""]


def test_buckets_and_what_they_replace(train, caplog):
    buckets = (
        "bucket_config = {'256': {1: (1.0, 4)}}\ndataset = dict(type='%s', num_frames=None, image_size=(None, None))"
    )
    assert train(extra=buckets % "VideoTextDataset").bucket_config is None  # another dataset than that of buckets
    assert "bucket_config has no effect with a VideoTextDataset" in caplog.text
    cfg = train(extra=buckets % "VariableVideoTextDataset" + "\nbatch_size = 10")
    assert (cfg.batch_size, list(cfg.bucket_config)) == (1, ["256"])
    assert "batch_size=10 has no effect with bucket_config" in caplog.text
    assert "batch_size=3 has no" in complaint(train, "--batch-size=3", extra=buckets % "VariableVideoTextDataset")


def test_a_mark_that_replaces_nothing_is_no_setting(train):
    assert "_delete_" not in train(extra="model = dict(type='XL/2', _delete_=True)").model


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--num-frames", "32"], "num_frames", 32),
        (["--num_frames=32"], "num_frames", 32),
        (["--lr", "1e-4"], "lr", 1e-4),
        (["--lr", "1"], "lr", 1.0),
        (["--image-size", "128", "64"], "image_size", (128, 64)),
        (["--image-size", "(128, 64)"], "image_size", (128, 64)),
        (["--image-size", "128,64"], "image_size", (128, 64)),
        (["--image-size=128,64"], "image_size", (128, 64)),
        (["--adam-betas", "0.5", "0.9"], "adam_betas", (0.5, 0.9)),
        (["--wandb"], "wandb", True),
        (["--wandb", "True"], "wandb", True),
        (["--wandb", "yes"], "wandb", True),
        (["--wandb", "1"], "wandb", True),
        (["--wandb", "False"], "wandb", False),
        (["--wandb=no"], "wandb", False),
        (["--wandb", "0"], "wandb", False),
        (["--wandb", "--seed", "3"], "wandb", True),
        (["--seed", "-3"], "seed", -3),
        (["--max-steps", "None"], "max_steps", None),
        (["--load", "none"], "load", None),
        (["--load", "123"], "load", "123"),
        (["--data-path", "other.csv"], "data_path", "other.csv"),
        (["--lr-schedule", "cosine"], "lr_schedule", "cosine"),
        (["lr=1e-4"], "lr", 1e-4),
        (["image_size=(128, 64)"], "image_size", (128, 64)),
        (["max_steps=None"], "max_steps", None),
        (["data_path=a=b.csv"], "data_path", "a=b.csv"),
        (["--wandb", "seed=3"], "wandb", True),
        (["--wandb", "seed=3"], "seed", 3),
        (["--wandb", "guidance_scale=1.5"], "scheduler", {"type": "iddpm", "cfg_scale": 1.5}),  # SpeeDiT's
        (["--wandb", "diffusion.cfg_channel=1"], "wandb", True),
        (["--exp-name", "lr=1e-4"], "exp_name", "lr=1e-4"),
    ],
)
def test_a_field_on_the_command_line(train, argv, field, value):
    got = getattr(train(*argv), field)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argv", "component", "key", "value"),
    [
        (["--model.space_scale", "0.5"], "model", "space_scale", 0.5),
        (["--model.space-scale=0.5"], "model", "space_scale", 0.5),
        (["--model.space-scale", "-0.5"], "model", "space_scale", -0.5),
        (["--model.input-size", "(16, 32, 32)"], "model", "input_size", (16, 32, 32)),
        (["--model.from_pretrained", "None"], "model", "from_pretrained", None),
        (["--ckpt-path", "w.pth"], "model", "from_pretrained", "w.pth"),
        (["--ckpt-path", "123"], "model", "from_pretrained", "123"),
        (["--ckpt_path=None"], "model", "from_pretrained", None),
        (["--model.from-pretrained", "123"], "model", "from_pretrained", "123"),
        (["--model.label", "2"], "model", "label", "2"),
        (["--cfg-scale", "3"], "scheduler", "cfg_scale", 3.0),
        (["--num-sampling-steps", "20"], "scheduler", "num_sampling_steps", 20),
        (["--cfg-channel", "None"], "scheduler", "cfg_channel", None),
        (["--flash-attn", "False"], "model", "enable_flash_attn", False),
        (["--flash-attn", "no"], "model", "enable_flash_attn", False),
        (["--flash-attn"], "model", "enable_flash_attn", True),
        (["--layernorm-kernel", "0"], "model", "enable_layernorm_kernel", False),
        (["--model.enable_layernorm_kernel", "no"], "model", "enable_layernorm_kernel", False),
        (["--model.enable_layernorm_kernel"], "model", "enable_layernorm_kernel", True),
        (["--text-encoder.shardformer", "true"], "text_encoder", "shardformer", True),
        (["--dataset.text-columns", "('a', 'b')"], "dataset", "text_columns", ("a", "b")),
        (["--dataset.text-columns", "caption"], "dataset", "text_columns", ["caption"]),
        (["scheduler.cfg_scale=1.5"], "scheduler", "cfg_scale", 1.5),
        (["cfg_scale=3"], "scheduler", "cfg_scale", 3.0),
        (["model.label=2"], "model", "label", "2"),
        (["model.from_pretrained=w.py"], "model", "from_pretrained", "w.py"),
    ],
)
def test_a_key_inside_a_component_on_the_command_line(train, argv, component, key, value):
    got = getattr(train(*argv), component)[key]
    assert got == value
    assert type(got) is type(value)


def test_other_keys_of_a_component_stay(train):
    assert train("--model.space_scale", "0.5").model == {
        "type": "XL/2",
        "depth": 4,
        "from_pretrained": "weights.pth",
        "space_scale": 0.5,
    }


def test_a_config_may_have_an_equals_sign_in_its_name(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(TRAIN, "lr=1.py")
    assert parse_config(TrainConfig, REGISTRIES, ["lr=1.py", "lr=2"]).lr == 2.0


def test_a_setting_without_dashes_ends_a_list(infer):
    cfg = infer("--prompt", "a lake", "e=mc2 on a board", "scheduler.cfg_scale=1.5", "fps=4", "--prompt-path=x")
    assert (cfg.prompt, cfg.scheduler["cfg_scale"], cfg.fps) == (["a lake", "e=mc2 on a board"], 1.5, 4)
    assert infer("prompt=a lake, seed=3").prompt == ["a lake, seed=3"]


def test_prompts_are_a_list(infer):
    assert infer("--prompt", "a lake", "-5 degrees", "--seed", "1").prompt == ["a lake", "-5 degrees"]
    assert infer("--prompt=--dashes--").prompt == ["--dashes--"]
    assert infer("--prompt", "['a', 'b']").prompt == ["a", "b"]
    assert infer("--prompt", "[unclosed").prompt == ["[unclosed"]
    assert infer("--prompt", "42").prompt == ["42"]


def test_options_may_stand_before_the_config(write):
    path = write(TRAIN)
    cfg = parse_config(TrainConfig, REGISTRIES, ["--wandb", path])
    assert cfg.wandb is True
    assert parse_config(TrainConfig, REGISTRIES, ["--image-size", "8", "16", path]).image_size == (8, 16)


def test_removed_fields_may_be_off_and_nothing_else(write):
    off = {"cast_once": False, "float8": False}
    path = write(TRAIN)
    cfg = parse_config(TrainConfig, REGISTRIES, [path, "--cast-once", "False", "--float8=None"])
    assert cfg == parse_config(TrainConfig, REGISTRIES, [write(TRAIN + "cast_once = False\nfloat8 = False\n")])
    assert config_from_dict(TrainConfig, to_dict(cfg) | off, REGISTRIES) == cfg  # of a checkpoint
    assert off.keys().isdisjoint(to_dict(cfg))
    with pytest.raises(UserError) as error:
        parse_config(TrainConfig, REGISTRIES, [write(TRAIN), "--cast-once", "--float8", "rowwise"])
    assert "cast_once=True: this field was removed: it gained less than 3 % of a step" in str(error.value)
    assert "float8='rowwise': this field was removed: training in float8 was slower than in bf16" in str(error.value)
    with pytest.raises(UserError, match=r"float8=True: this field was removed"):
        parse_config(TrainConfig, REGISTRIES, ["--float8", path])


def test_vae_training_has_one_engine(write):
    path = write('vae = dict(type="vae")\ndata_path = "x.csv"\n')
    cfg = parse_config(VAETrainConfig, REGISTRIES, [path, "--plugin=ddp"])
    old = {"plugin": "ddp", "fsdp_reshard": "zero2"}  # of a checkpoint
    assert config_from_dict(VAETrainConfig, to_dict(cfg) | old, REGISTRIES) == cfg
    assert old.keys().isdisjoint(to_dict(cfg))
    for argv in (["--plugin=fsdp2"], ["--fsdp-reshard=zero3"]):
        with pytest.raises(UserError, match="a VAE is trained with ddp"):
            parse_config(VAETrainConfig, REGISTRIES, [path, *argv])
    with pytest.raises(UserError, match="shard_size=2 has no effect without hybrid_zero=True"):
        parse_config(VAETrainConfig, REGISTRIES, [path, "--shard-size=2"])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num-frame", "3"], "--num-frame is not a field of TrainConfig. Did you mean '--num-frames'?"),
        (["--ckptpath", "3"], "Did you mean '--ckpt-path'?"),
        (["--depth", "3"], "--depth is not a field, but model takes it: write --model.depth."),
        (["--lr", "abc"], "--lr: 'abc': expected float."),
        (["--lr", "nan"], "--lr: 'nan': expected float."),
        (["--lr"], "--lr: a value is missing, expected float."),
        (["--num-frames", "1.5"], "--num-frames: '1.5': expected int."),
        (["--image-size", "256"], "--image-size: '256': expected (int, int)."),
        (["--image-size", "a b"], "--image-size: 'a b': expected (int, int)."),
        (["--wandb", "maybe"], "--wandb: 'maybe': expected bool."),
        (["--plugin", "zero3"], "--plugin: 'zero3': expected 'ddp'"),
        (["--cfg-scale", "high"], "--cfg-scale: 'high': expected float."),
        (["--lr.x", "1"], "--lr.x: lr is float; it has no keys."),
        (["--model.", "1"], "has no keys"),
        (["--model.depth.x", "1"], "--model.depth.x: model.depth is 4 and has no keys."),
        (["--model.enable_layernorm_kernel", "maybe"], "'maybe' is not a bool"),
        (["stray"], "'stray' on the command line belongs to no option."),
        (["num_frame=3"], "--num_frame is not a field of TrainConfig. Did you mean '--num-frames'?"),
        (["lr=abc"], "--lr: 'abc': expected float."),
        (["--lr", "1", "lr=2"], "--lr 1.0 and --lr 2.0 both set lr; keep one."),
        (["a b=2"], "'a b=2' on the command line belongs to no option."),
        (["-x"], "'-x' on the command line belongs to no option."),
        (["--lr", "1", "--lr", "2"], "--lr 1.0 and --lr 2.0 both set lr; keep one."),
        (["--ckpt-path", "a", "--model.from_pretrained", "b"], "both set model.from_pretrained"),
        (["--flash-attn", "True", "--model.enable_flashattn", "False"], "both set model.enable_flash_attn"),
    ],
)
def test_a_mistake_on_the_command_line(train, argv, expected):
    assert expected in complaint(train, *argv)


@pytest.mark.parametrize(
    ("argv", "field", "value", "note"),
    [
        (["--learning-rate", "1e-4"], "lr", 1e-4, "--learning-rate is --lr here (learning rate)."),
        (["learning_rate=1e-4"], "lr", 1e-4, "--learning_rate is --lr here (learning rate)."),
        (["--max_train_steps=5"], "max_steps", 5, "--max_train_steps is --max-steps here"),
        (["--gradient_checkpointing"], "grad_checkpoint", "block", "is --grad-checkpoint here (activation checkpointing)."),
        (["--wandb", "learning_rate=1e-4"], "wandb", True, "--lr here"),
        (["--lora-rank", "8"], "lora", {"rank": 8}, "--lora-rank is --lora.rank here."),
        (["--weights", "w"], "model", {"type": "XL/2", "depth": 4, "from_pretrained": "w"}, "is --ckpt-path here (weights"),
    ],
)  # fmt: skip
def test_names_of_other_codes_are_taken_and_said_once(train, caplog, argv, field, value, note):
    assert getattr(train(*argv), field) == value
    assert caplog.text.count(note) == 1


@pytest.mark.parametrize("schema", SCRIPTS)
def test_a_name_of_other_codes_has_one_meaning(schema):
    own = {*schema_fields(schema), *schema.aliases, *schema.removed}
    assert not own & {*schema.other_names, *schema.open_names}
    assert not schema.other_names.keys() & schema.open_names.keys()
    targets = {ours.split(".")[0] for ours in schema.other_names.values()}
    assert targets <= {*schema_fields(schema), *schema.aliases}
    assert all(
        schema_fields(schema)[ours.split(".")[0]].takes_keys for ours in schema.other_names.values() if "." in ours
    )


def test_one_word_means_sampling_steps_to_a_sampler_and_optimizer_steps_to_a_training(train, infer):
    assert train("--steps", "5").max_steps == 5
    assert infer("--steps", "5").scheduler["num_sampling_steps"] == 5


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--learning-rate", "1e-4", "--lr", "2"], "--learning-rate 0.0001 and --lr 2.0 both set lr; keep one."),
        (["--learning-rate", "fast"], "--learning-rate: 'fast': expected float."),
        (["--resume"], "--resume: a value is missing, expected str or None."),
        (["--width", "512"], "--width is no option: image_size is (height, width): --image-size HEIGHT WIDTH."),
        (["--checkpoint", "x"], "--load CHECKPOINT resumes a run; --ckpt-path WEIGHTS starts a new one"),
        (["--learnin-rate", "1"], "--learnin-rate is not a field of TrainConfig. Did you mean '--lr'?"),
        (["--cfg", "7.5"], "--cfg names the config; the scale of guidance is --cfg-scale 7.5."),
        (["--model", "XL/2"], "Its arguments are set one by one: --model.type NAME."),
        (["--lora"], "Its arguments are set one by one: --lora.rank 16."),
        (["--image-size", "256"], "--image-size: '256': expected (int, int). Write --image-size HEIGHT WIDTH."),
        (["--from-pretrained", "x"], "model and vae take it: write --model.from_pretrained or --vae.from_pretrained."),
    ],
)
def test_names_of_other_codes_that_leave_something_open(train, argv, expected):
    assert expected in complaint(train, *argv)


def test_a_file_is_told_the_names_here(train, infer):
    text = complaint(train, extra="learning_rate = 1e-4\nwidth = 512\nflow_shift = 3\nweights = 'w'")
    for expected in (
        "'learning_rate' is not a field of TrainConfig. Did you mean 'lr'?",
        "'width' is not a field of TrainConfig. Instead: image_size is (height, width)",
        "Did you mean 'scheduler.shift'?",
        "Did you mean 'model.from_pretrained'?",
    ):
        assert expected in text


def test_setting_one_thing_twice_to_one_value_is_fine(train):
    assert train("--cfg-scale", "3", "--scheduler.cfg_scale", "3.0").scheduler["cfg_scale"] == 3.0


def test_values_are_read_and_never_run(train):
    assert train("--model.label", "__import__('os').getcwd()").model["label"] == "__import__('os').getcwd()"


def test_a_name_of_the_command_line_is_explained_when_a_file_uses_it(train):
    assert "in a file set model.from_pretrained" in complaint(train, extra='ckpt_path = "x"')


@pytest.mark.parametrize(
    "wrong",
    [
        ["--wandbb"],
        ["--wandbb", "True"],
        ["--wandbb=True"],
        ["--wandbb", "--lr", "1"],
        ["wandbb=3"],
        ["--lr", "1", "--wandbb"],
    ],
)
def test_a_misspelt_flag_before_the_config_is_named_and_is_all_that_is_wrong(write, wrong):
    with pytest.raises(UserError) as caught:
        parse_config(TrainConfig, REGISTRIES, [*wrong, write(TRAIN)])
    assert str(caught.value) == "--wandbb is not a field of TrainConfig. Did you mean '--wandb'? --help lists all."


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ["no config file given"]),
        (["--wandbb"], ["no config file given", "Did you mean '--wandb'?"]),
        (["--wandbb", "gone.py"], ["config file gone.py does not exist", "Did you mean '--wandb'?"]),
        (["gone.py", "--wandbb", "True"], ["config file gone.py does not exist", "Did you mean '--wandb'?"]),
        (["--lr", "gone.py"], ["no config file given", "--lr: 'gone.py': expected float"]),
        (["--exp-name", "gone.py"], ["no config file given", "the config first"]),
        (["gone.py", "other.py"], ["gone.py does not exist", "'other.py': gone.py is the config already"]),
    ],
)
def test_where_there_is_no_config_all_else_that_is_wrong_is_reported_too(argv, expected):
    with pytest.raises(UserError) as caught:
        parse_config(TrainConfig, REGISTRIES, argv)
    assert all(text in str(caught.value) for text in expected)


def test_a_flag_that_is_no_field_may_have_been_meant_for_the_tool(write):
    with pytest.raises(UserError, match="Did you mean '--print-config'"):
        parse_config(TrainConfig, REGISTRIES, ["--print-confg", write(TRAIN)])
    with pytest.raises(UserError, match=r"--adaptr is not a field of TrainConfig\. Did you mean '--adapter'\?"):
        parse_config(TrainConfig, REGISTRIES, ["--adaptr", "x", write(TRAIN)], options=["adapter"])
    with pytest.raises(UserError, match=r"--output is not a field of TrainConfig\. Did you mean '--outputs'\?"):
        parse_config(TrainConfig, REGISTRIES, ["--output", "x", write(TRAIN)], options=["adapter"])


# --- dataset


def test_the_dataset_is_made_from_the_top_level(train):
    assert train(extra="num_frames = 8\nroot = 'videos'").dataset == {
        "type": "VideoTextDataset",
        "data_path": "clips.csv",
        "root": "videos",
        "num_frames": 8,
        "frame_interval": 1,
        "image_size": (256, 256),
    }


def test_no_dataset_may_be_said(train):
    assert train(extra="dataset = None").dataset == train().dataset


def test_a_dataset_gets_what_it_does_not_set_and_only_what_it_takes(train):
    cfg = train(extra="num_frames = 8\ndataset = dict(type='Synthetic', length=3)")
    assert cfg.dataset == {"type": "Synthetic", "length": 3, "num_frames": 8}


def test_the_keys_of_a_dataset_hold_for_the_top_level(train):
    cfg = train(extra="dataset = dict(type='VideoTextDataset', num_frames=64, image_size=[64, 32])")
    assert (cfg.num_frames, cfg.image_size) == (64, (64, 32))
    assert cfg.dataset["image_size"] == (64, 32)


def test_one_setting_in_two_places_must_agree(train):
    dataset = "dataset = dict(type='VideoTextDataset', num_frames=64)"
    assert "num_frames=8 and dataset.num_frames=64 contradict each other" in complaint(
        train, extra=f"num_frames = 8\n{dataset}"
    )
    assert train(extra=f"num_frames = 64\n{dataset}").num_frames == 64


def test_the_command_line_reaches_both_places(train):
    dataset = "dataset = dict(type='VideoTextDataset', num_frames=64, data_path='inner.csv')"
    for argv in (["--num-frames", "4"], ["--dataset.num_frames", "4"]):
        cfg = train(*argv, extra=dataset, text=COMPONENTS)
        assert cfg.num_frames == cfg.dataset["num_frames"] == 4
    cfg = train("--data-path", "x.csv", extra=dataset)
    assert cfg.data_path == cfg.dataset["data_path"] == "x.csv"
    assert "contradict" in complaint(train, "--num-frames", "4", "--dataset.num_frames", "5")


def test_none_at_the_top_level_leaves_it_to_the_dataset(train):
    cfg = train(extra="data_path = None\ndataset = dict(type='VideoTextDataset', data_path='inner.csv')")
    assert cfg.data_path == cfg.dataset["data_path"] == "inner.csv"


def test_data_must_be_named(train):
    assert "--data-path clips.csv" in complaint(train, text=COMPONENTS)
    assert train(text=COMPONENTS, extra="dataset = dict(type='Synthetic')").data_path is None


# --- output


def test_print_config_says_where_each_value_was_set(write, capsys):
    write(TRAIN + "num_frames = 8", "base.py")
    child = write('_base_ = "base.py"\nlr = 5e-4\nmodel = dict(space_scale=0.5)', "child.py")
    with pytest.raises(SystemExit) as exit_:
        parse_config(TrainConfig, REGISTRIES, [child, "--print-config", "--cfg-scale", "3", "--seed", "7"])
    assert exit_.value.code == 0
    origin = dict(line.split("  # ") for line in capsys.readouterr().out.splitlines())
    origin = {left.strip(): right for left, right in origin.items()}
    assert origin["lr = 0.0005"] == f"{child}:2"
    assert origin["model.space_scale = 0.5"] == f"{child}:3"
    assert origin["model.depth = 4"] == f"{child.replace('child', 'base')}:2"
    assert origin["num_frames = 8"].endswith("base.py:7")
    assert origin["dataset.num_frames = 8"].endswith("base.py:7")
    assert origin["dataset.type = 'VideoTextDataset'"] == "default"
    assert origin["scheduler.cfg_scale = 3.0"] == "command line --cfg-scale"
    assert origin["seed = 7"] == "command line --seed"
    assert origin["batch_size = 1"] == "default"


def test_print_config_still_reports_problems(train):
    assert "batch_size" in complaint(train, "--print-config", "--batch-size", "0")


@pytest.mark.parametrize("schema", SCRIPTS)
@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["missing.py", "--lr", "x", "--help"]])
def test_help_lists_every_field_and_alias_once(schema, argv, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/inference_vae.py"])
    with pytest.raises(SystemExit) as exit_:
        parse_config(schema, REGISTRIES, argv)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for f in schema_fields(schema).values():
        assert text.count(f"\n  --{f.name.replace('_', '-')} ") == 1
        assert " ".join(f.doc.split()) in words
    assert all(f"\n  --{name.replace('_', '-')} " in text for name in schema.aliases)
    assert max(map(len, text.splitlines())) <= 100
    config, *flags = shlex.split(schema.example)
    assert read_command(schema, [config, *flags]).unknown == []
    parse_config(schema, None, [config, *flags])


@pytest.mark.parametrize(
    ("argv0", "typed"),
    [
        ("opensora train", "opensora train"),
        ("/usr/bin/own-tool", "own-tool"),
        ("scripts/train.py", "python scripts/train.py"),
        (str(Path("scripts/train.py").absolute()), "python scripts/train.py"),
    ],
)
def test_help_and_errors_name_the_program_that_was_started(argv0, typed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [argv0, "--help"])
    with pytest.raises(SystemExit):
        parse_config(TrainConfig)
    usage, example, _, first = capsys.readouterr().out.split("\n\n")[:4]
    assert usage.startswith(f"usage: {typed} CONFIG ")
    assert example.startswith(f"  {typed} configs/")
    assert first.startswith("Set first:")
    with pytest.raises(UserError, match=f"usage: {typed} CONFIG"):
        parse_config(TrainConfig, None, [])


def test_help_does_not_wait_for_torch():
    code = "import sys, opensora.config.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_names_of_dtypes_are_those_that_there_are():
    assert schema_fields(TrainConfig)["dtype"].choices == tuple(DTYPES)


def test_a_config_survives_to_dict_and_back(train, infer):
    configs = [
        train("--image-size", "8", "16", "--model.input_size", "(1, 2, 3)"),
        train(extra="dataset = dict(type='Synthetic', length=3)\nmax_steps = 10"),
        infer("--prompt", "a", "b", "--save-fps", "12.5"),
    ]
    for cfg in configs:
        again = config_from_dict(type(cfg), to_dict(cfg), REGISTRIES)
        assert again == cfg
        assert config_from_dict(type(cfg), to_dict(again)) == cfg


def test_to_dict_shares_nothing_with_the_config(train):
    cfg = train()
    to_dict(cfg)["model"]["depth"] = 99
    assert cfg.model["depth"] == 4


def test_a_dumped_config_is_a_config(train, tmp_path):
    cfg = train("--image-size", "8", "16", "--lr", "1e-4")
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(to_dict(cfg)))
    assert json.loads(path.read_text())["image_size"] == [8, 16]
    assert parse_config(TrainConfig, REGISTRIES, [str(path)]).image_size == (8, 16)
    again = parse_config(TrainConfig, REGISTRIES, [str(path), "--num-frames", "4"])
    assert again.num_frames == again.dataset["num_frames"] == 4
    assert again.lr == cfg.lr


OLDER = {True: "block", "yes": "block", "2": "mlp:2/3", "False": "none", 0: "none", 3: "mlp"}


@pytest.mark.parametrize(("older", "present"), [*OLDER.items(), ("1", "mlp:1/3"), ("selective:2", "selective:2")])
def test_older_spellings_of_checkpointing_become_the_one_there_is(train, older, present):
    cfg = train("--grad-checkpoint", str(older))
    assert cfg.grad_checkpoint == present
    assert config_from_dict(TrainConfig, to_dict(cfg) | {"grad_checkpoint": older}).grad_checkpoint == present


def test_checkpointing_by_a_bare_flag_and_by_two_values_that_are_equal_in_python(write, train):
    path = write(TRAIN + "grad_checkpoint = 1")
    assert parse_config(TrainConfig, REGISTRIES, [path]).grad_checkpoint == "mlp:1/3"
    assert parse_config(TrainConfig, REGISTRIES, ["--grad-checkpoint", path]).grad_checkpoint == "block"
    assert "both set grad_checkpoint; keep one" in complaint(train, "--grad-checkpoint=True", "--grad-checkpoint=1")
    assert "grad_checkpoint=1.5: expected str" in complaint(train, extra="grad_checkpoint = 1.5")


@pytest.mark.parametrize("schema", [TrainConfig, InferenceConfig, VAETrainConfig])
def test_no_field_takes_numbers_and_booleans_which_compare_equal(schema):
    fields = schema_fields(schema).values()
    assert not [
        f.name
        for f in fields
        if {bool, int} <= set(members(f.annotation)) or {bool, float} <= set(members(f.annotation))
    ]


def test_bucket_sizes_survive_json(write, tmp_path):
    text = TRAIN + "dataset = dict(type='VariableVideoTextDataset')\nbucket_config = {'256': {1: (1.0, 4)}}"
    cfg = parse_config(TrainConfig, None, [write(text)])
    (tmp_path / "dump.json").write_text(json.dumps(to_dict(cfg)))
    assert list(parse_config(TrainConfig, None, [str(tmp_path / "dump.json")]).bucket_config["256"]) == [1]


@pytest.mark.parametrize("schema", [TrainConfig, InferenceConfig, VAETrainConfig])
def test_every_field_is_documented_and_its_default_fits_its_type(schema):
    for f in schema_fields(schema).values():
        assert f.doc
        if f.default is not REQUIRED:
            assert coerce(f.default, f.annotation) == f.default
            assert not f.problem(f.default)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, ""),
        ("3", int, "int"),
        (True, int, "int"),
        (2.5, int | None, "int or None"),
        (1, float, ""),
        ("False", bool, "bool"),
        (1, bool, ""),
        (3, str | None, "str or None"),
        (None, str | None, ""),
        (3, Sequence[int], "list of int"),
        ("text", Sequence[str], "list of str"),
        ([1, None], Sequence[int | None] | None, ""),
        ("b", Literal["a"], "'a'"),
        ("b", Literal["a"] | str, ""),
        ("anything", Mapping[str, int] | None, ""),
        (object, Any, ""),
        (3, inspect.Parameter.empty, ""),
    ],
)
def test_an_argument_of_a_part_has_the_type_that_its_constructor_names(value, annotation, expected):
    assert wrong_type(value, annotation) == expected


def test_a_wrong_type_inside_a_part_names_the_line(tmp_path):
    config = tmp_path / "c.py"
    config.write_text(
        'model = dict(\n    type="STDiT-XS/2",\n    depth="8",\n    pred_sigma="False",\n)\n'
        'vae = dict(type="VideoAutoencoderKL")\ntext_encoder = dict(type="hf")\nscheduler = dict(type="iddpm")\n'
        "num_frames, fps, image_size = 1, 8, (32, 32)\n"
    )
    with pytest.raises(UserError) as caught:
        parse_config(InferenceConfig, {"model": MODELS}, [str(config)])
    assert "model.depth='8': expected int." in str(caught.value)
    assert "model.pred_sigma='False': expected bool." in str(caught.value)
    assert f"({config}:1)" in str(caught.value)


def test_a_seed_of_training_has_64_bits(train):
    for seed in (-(2**63), 2**64 - 1):
        assert train("--seed", str(seed)).seed == seed
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(UserError, match=rf"seed={seed} has more than PyTorch's 64 bits"):
            train("--seed", str(seed))
