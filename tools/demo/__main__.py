"""A page to sample from in a browser: `python -m tools.demo [CONFIG_OR_CHECKPOINT ...] [--field value ...]`.

    pip install -e '.[demo,quickstart]'
    python -m tools.demo                                       # the quickstart's model, on a CPU
    python -m tools.demo outputs/000-STDiT/epoch1-global_step500 outputs/001-STDiT/epoch1-global_step500
    python -m tools.demo configs/opensora/inference/16x256x256.py --ckpt-path W --port 8000

Several models make a menu; one at a time is in memory. All that scripts/inference.py takes may be given, and holds for all of
them; the form begins with these settings, and those of the first prompt. Samples and their sidecars go to `--save-dir`
(outputs/demo), where scripts and tools find them as any others. The page is served to this machine only, unless `--host 0.0.0.0`
says otherwise: it has no password.
"""

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from opensora.config import command_line
from opensora.config.load import InferenceConfig, parse_config
from opensora.inference.build import COMPONENTS
from opensora.inference.sizes import trained_config, trained_sizes
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.demo.page import CSS, build_page
from tools.demo.studio import LARGEST_REFERENCE, Studio

QUICKSTART = "configs/quickstart/inference.py"
FOLDER = "outputs/demo"


def read_command(argv: Sequence[str]) -> tuple[dict[str, InferenceConfig], argparse.Namespace]:
    """The config of each model by its name on the command line, and the demo's own options.

    Raises:
        UserError: a config is wrong.
    """
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves everybody who can reach this machine")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--examples", help="file of prompts to click, as prompt_path of sampling")
    own, rest = parser.parse_known_args(argv)
    sources = [*itertools.takewhile(lambda word: not word.startswith("-") and "=" not in word, rest)]
    fields = rest[len(sources) :]
    if not sources and command_line.read_command(InferenceConfig, fields).config is None:
        sources = [QUICKSTART]
    if not any(argument.partition("=")[0] in ("--save-dir", "--save_dir") for argument in fields):
        fields += ["--save-dir", FOLDER]
    cfgs = {}
    for source in dict.fromkeys(sources) or [None]:  # None: the config stands among the fields
        words = fields if source is None else [source, *_size_of_buckets(source, fields), *fields]
        cfg = parse_config(InferenceConfig, COMPONENTS, words, options=vars(own))
        if cfg.sp_size > 1 or cfg.cfg_parallel or cfg.num_sample > 1:
            raise UserError(
                "the demo makes one video at a time in one process: leave out sp_size, cfg_parallel and num_sample."
            )
        if cfg.sample_name is not None:
            raise UserError(
                "sample_name has no effect on the demo, which names samples after their prompts: leave it out."
            )
        cfgs[source or cfg.model["type"]] = cfg
    return cfgs, own


def _size_of_buckets(checkpoint: str, fields: Sequence[str]) -> list[str]:
    """Flags for the longest of the smallest sizes of a checkpoint that was trained in buckets, where no flag names a size."""
    config, names = trained_config(checkpoint), ("num_frames", "duration", "image_size", "resolution")
    given = {field.lstrip("-").partition("=")[0].replace("-", "_") for field in fields}
    if not config.get("bucket_config") or config.get("val_num_frames") or given.intersection(names):
        return []
    num_frames, height, width = max(trained_sizes(checkpoint), key=lambda size: (-size[1] * size[2], size[0]))
    return ["--num-frames", str(num_frames), "--image-size", str(height), str(width)]


@exit_on_user_error
def main() -> None:
    """Build the pipeline and serve the page until it is stopped."""
    cfgs, own = read_command(sys.argv[1:])
    if importlib.util.find_spec("gradio") is None:
        raise UserError("the demo needs gradio: pip install -e '.[demo]'")
    first = next(iter(cfgs.values()))
    if first.verbose > 0:
        show_messages()
    folder = Path(first.save_dir)
    page = build_page(Studio(cfgs, folder, own.examples))
    page.launch(
        server_name=own.host,
        server_port=own.port,
        allowed_paths=[str(folder.resolve())],
        max_file_size=LARGEST_REFERENCE,
        css=CSS,
    )


if __name__ == "__main__":
    main()
