"""A page to sample from in a browser: `python -m tools.demo [CONFIG] [--ckpt-path W] [--field value ...]`.

    pip install -e '.[demo,quickstart]'
    python -m tools.demo                                       # the quickstart's model, on a CPU
    python -m tools.demo configs/opensora/inference/16x256x256.py --ckpt-path W --port 8000

All that scripts/inference.py takes may be given; the form begins with these settings, and those of the first prompt. Samples
and their sidecars go to `--save-dir` (outputs/demo), where scripts and tools find them as any others. The page is served to this
machine only, unless `--host 0.0.0.0` says otherwise: it has no password.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from opensora.config import command_line
from opensora.config.load import InferenceConfig, parse_config
from opensora.inference.build import COMPONENTS
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.demo.page import build_page
from tools.demo.studio import LARGEST_REFERENCE, Studio

QUICKSTART = "configs/quickstart/inference.py"
FOLDER = "outputs/demo"


def read_command(argv: Sequence[str]) -> tuple[InferenceConfig, argparse.Namespace]:
    """The config of the first form, and where to serve.

    Raises:
        UserError: the config is wrong.
    """
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves everybody who can reach this machine")
    parser.add_argument("--port", type=int, default=7860)
    own, rest = parser.parse_known_args(argv)
    if command_line.read_command(InferenceConfig, rest).config is None:
        rest = [QUICKSTART, *rest]
    if not any(argument.partition("=")[0] in ("--save-dir", "--save_dir") for argument in rest):
        rest += ["--save-dir", FOLDER]
    cfg = parse_config(InferenceConfig, COMPONENTS, rest, options=vars(own))
    if cfg.sp_size > 1 or cfg.cfg_parallel or cfg.num_sample > 1:
        raise UserError(
            "the demo makes one video at a time in one process: leave out sp_size, cfg_parallel and num_sample."
        )
    if cfg.sample_name is not None:
        raise UserError("sample_name has no effect on the demo, which names samples after their prompts: leave it out.")
    return cfg, own


@exit_on_user_error
def main() -> None:
    """Build the pipeline and serve the page until it is stopped."""
    cfg, own = read_command(sys.argv[1:])
    if importlib.util.find_spec("gradio") is None:
        raise UserError("the demo needs gradio: pip install -e '.[demo]'")
    if cfg.verbose > 0:
        show_messages()
    page = build_page(Studio(cfg, Path(cfg.save_dir)))
    allowed = [str(Path(cfg.save_dir).resolve())]
    page.launch(server_name=own.host, server_port=own.port, allowed_paths=allowed, max_file_size=LARGEST_REFERENCE)


if __name__ == "__main__":
    main()
