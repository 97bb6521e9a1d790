"""A toy of every part, real classes at small size, and the train script called as users call it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.conftest import free_ports, rank_environment, start_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def toy_encoders(tmp_path_factory) -> dict[str, Path]:
    """Folders of an untrained AutoencoderKL and an untrained BERT with a word-level tokenizer."""
    from diffusers import AutoencoderKL
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        mid_block_add_attention=False,
        scaling_factor=0.5,
    ).save_pretrained(folder / "vae")
    words = [
        "[PAD]",
        "[UNK]",
        "a",
        "the",
        "of",
        "in",
        "grey",
        "white",
        "rabbit",
        "dog",
        "city",
        "sky",
        "box",
        "hand",
        "cup",
    ]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder / "text"
    )
    BertModel(
        BertConfig(
            vocab_size=len(words),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
        )
    ).save_pretrained(folder / "text")
    return {"vae": folder / "vae", "text": folder / "text"}


@pytest.fixture(scope="session")
def toy_config(tmp_path_factory, toy_encoders) -> Path:
    """A training config over the repository's clips that takes milliseconds a step."""
    path = tmp_path_factory.mktemp("config") / "toy.py"
    path.write_text(
        f'''"""Toy."""
num_frames = 2
frame_interval = 2
image_size = (16, 24)
data_path = {str(ROOT / "assets/clips/clips.csv")!r}
num_workers = 0
dtype = "fp32"
device = "cpu"
plugin = "ddp"
model = dict(type="STDiT-XXS/2")
vae = dict(type="VideoAutoencoderKL", from_pretrained={str(toy_encoders["vae"])!r})
text_encoder = dict(type="hf", from_pretrained={str(toy_encoders["text"])!r}, model_max_length=12)
scheduler = dict(type="iddpm")
seed = 7
epochs = 100
max_steps = 4
log_every = 1
ckpt_every = 2
batch_size = 4
lr = 1e-3
warmup_steps = 2
ema_decay = 0.9
'''
    )
    return path


@pytest.fixture(scope="session")
def train_script():
    """The module scripts/train.py."""
    return load_script()


def load_script() -> ModuleType:
    """scripts/train.py as a module."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(train_script, toy_config, tmp_path, monkeypatch):
    """Run scripts/train.py in this process with some overrides; returns the run's folder."""

    def run(*options: str, name: str = "run") -> Path:
        argv = ["train.py", str(toy_config), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
        monkeypatch.setattr(sys, "argv", argv)
        train_script.main()
        return tmp_path / name

    return run


@pytest.fixture
def together(toy_config, tmp_path):
    """Run scripts/train.py in two gloo processes, as torchrun does but without its start; returns the runs' folders.

    Every argument is the options of a run, the first of them its name: `one, two = together(("one",), ("two", "--lr=1"))`.
    """

    def run(*runs: tuple[str, ...], processes: int = 2, timeout_s: float = 300) -> list[Path]:
        given = [
            [port, str(toy_config), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
            for port, (name, *options) in zip(free_ports(len(runs)), runs, strict=True)
        ]
        start_ranks(run_scripts, (processes, given), processes, "scripts/train.py", timeout_s)
        return [tmp_path / name for name, *_ in runs]

    return run


def run_scripts(rank: int, size: int, runs: list[list[str]]) -> None:
    """In a process of its own: scripts/train.py with each port and options in turn, as one of `size`."""
    os.environ.update(rank_environment(rank, size))
    script = load_script()
    for port, *arguments in runs:
        os.environ["MASTER_PORT"] = port
        sys.argv = ["train.py", *arguments]
        script.main()


@pytest.fixture
def torchrun(toy_config, tmp_path):
    """Run scripts/train.py under torchrun with two gloo processes; returns the run's folder."""

    def run(*options: str, name: str = "torchrun", processes: int = 2) -> Path:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        script = [str(ROOT / "scripts" / "train.py"), str(toy_config), f"--outputs={tmp_path}", f"--exp-name={name}"]
        done = subprocess.run(
            [*launcher, *script, *options], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return tmp_path / name

    return run
