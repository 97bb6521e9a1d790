"""Open-Sora's commands that have another name here: `python scripts/open_sora.py` lists them.

The files of those names, such as tools/caption/caption_llava.py, run this one, which prints our command and runs it with what the
options of Open-Sora 1.1 and 1.2 mean here; options of ours are passed on. Where there is no such translation, it says what to call.
"""

import argparse
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from opensora.utils.errors import UserError, exit_on_user_error

ROOT = Path(__file__).resolve().parents[1]

LOADING = "--num_workers=--num-workers --bs=--batch-size --prefetch_factor= --skip_if_existing"
POINTS = {"1": "0.5,", "2": "0.25,0.75", "3": "0.1,0.5,0.9"}  # of the clip's length, by --num_frames
CLIP = "{}.model=openai/clip-vit-large-patch14"
OPENAI = "https://api.openai.com/v1"


class Ours(NamedTuple):
    """What does the work of one of Open-Sora's commands.

    Attributes:
        command: a module of tools, a file of scripts, or a sentence that says how it is done.
        added: options that ours needs besides, before those of the command line.
        options: "--theirs=--ours"; "--theirs=$NAME" goes into the environment; "--theirs=" and the switch "--theirs" have no effect.
        suffix: theirs writes TABLE's name with this behind it.
    """

    command: str
    added: str = ""
    options: str = ""
    suffix: str = ""


CAMERA = Ours("tools.scoring", "--scorers camera_motion", "--disable-parallel", "_cmotion")
COMMANDS = {
    "tools/scoring/aesthetic/inference.py": Ours(
        "tools.scoring",
        f"--scorers aesthetic --set {CLIP.format('aesthetic')} --set aesthetic.head=pretrained_models/aesthetic.pth",
        f"{LOADING} --accumulate= --num_frames=--set",
        "_aes",
    ),
    "tools/scoring/matching/inference.py": Ours(
        "tools.scoring", f"--scorers matching --set {CLIP.format('matching')}", LOADING, "_match"
    ),
    "tools/scoring/ocr/inference.py": Ours("tools.scoring", "--scorers ocr", LOADING, "_ocr"),
    "tools/scoring/optical_flow/inference.py": Ours("tools.scoring", "--scorers flow", LOADING, "_flow"),
    "tools/caption/camera_motion/detect.py": CAMERA,
    "tools/caption/camera_motion_detect.py": CAMERA,
    "tools/caption/caption_llava.py": Ours(
        "tools.caption",
        "--model llava-hf/llava-v1.6-34b-hf --prompt video --frames 1 --long-side 336 --max-tokens 300",
        "--model-path=--model --prompt=--prompt --num-frames=--frames --resize=--long-side --bs=--batch-size --tp-size= --dp-size= "
        "--num-workers= --prefetch-factor= --flash-attention --profile --profile-warmup=",
        "_caption",
    ),
    "tools/caption/caption_gpt4.py": Ours(
        "tools.caption",
        f"--model gpt-4o --endpoint {OPENAI} --prompt video --frames 3 --max-tokens 300",
        "--prompt=--prompt --key=$OPENAI_API_KEY",
        "_caption",
    ),
    "scripts/inference-long.py": Ours("scripts/inference.py"),
    "scripts/misc/search_bs.py": Ours(
        "python -m tools.search_batch_size CONFIG OUT.py --data-path TABLE --goal even --base 240p:128 (or --base-seconds 12)"
    ),
    "scripts/misc/extract_feat.py": Ours("python -m tools.cache_features CONFIG --data-path TABLE --cache-dir DIR"),
}


@exit_on_user_error
def main() -> None:
    """Run what the file that ran this one is here."""
    name = Path(globals().get("CALLED", __file__)).resolve().relative_to(ROOT).as_posix()
    if name not in COMMANDS:
        print("\n".join(f"{old}: {ours.command} {ours.added}" for old, ours in COMMANDS.items()))
        return
    command, words = COMMANDS[name].command, translated(name, sys.argv[1:])
    if words is None:
        return
    module = ["-m"] if command.startswith("tools.") else []
    print(" ".join([f"{name} is now: python", *module, command, *words]), flush=True)
    sys.argv[1:] = words
    if module:
        sys.path.insert(0, str(ROOT))  # where a file that is run by its path has its own folder
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / command), run_name="__main__")


def translated(name: str, argv: Sequence[str]) -> list[str] | None:
    """The words behind our command; None: there is nothing to do.

    Raises:
        UserError: it cannot be translated.
    """
    ours = COMMANDS[name]
    if " " in ours.command:
        raise UserError(f"{name} of Open-Sora is not here. Instead: {ours.command}.")
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False, add_help=False)
    new_names = {}
    for option in ours.options.split():
        theirs, equals, new_names[theirs] = option.partition("=")
        parser.add_argument(theirs, dest=theirs, action="store" if equals else "store_true", default=None)
    known, rest = parser.parse_known_args(argv)
    given = {theirs: value for theirs, value in vars(known).items() if value is not None}
    words = [*ours.added.split(), *rest]
    if ours.suffix and rest and not rest[0].startswith("-"):
        table = Path(rest[0])
        if table.is_dir():
            raise UserError(
                f"{table} is a folder: make a table of it first, python -m tools.datasets.convert video {table}."
            )
        out = table.with_stem(f"{table.stem}{ours.suffix}")
        if given.pop("--skip_if_existing", False) and out.exists():
            print(f"{out} is there already.")
            return None
        words += [] if {"-o", "--out"} & {*rest} else ["--out", str(out)]
        words += [] if "--device" in rest or "--endpoint" in words or not has_gpu() else ["--device", "cuda"]
    for theirs, value in given.items():
        new = new_names[theirs]
        if new.startswith("$"):
            os.environ[new[1:]] = value
        elif not new:
            print(f"{theirs} has no effect here.")
        elif theirs == "--num_frames":
            words += [new, f"aesthetic.points={POINTS.get(value, value)}"]
        elif re.fullmatch(r"(image|video)-[\w-]*text", value):  # their prompts that show the model the caption
            words += [new, "refine", "--column", "caption"]
        else:  # a prompt such as video-f1-detail-3ex, and a model in the form that transformers reads
            value = re.sub(r"^(image|video)-[\w-]+$", r"\1", value)
            words += [new, re.sub(r"^liuhaotian/(llava-v1\.6-[\w-]+)$", r"llava-hf/\1-hf", value)]
    return words


def has_gpu() -> bool:
    """Theirs always ran on one."""
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
