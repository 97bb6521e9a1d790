"""Write captions for the clips of a table.

    python -m tools.caption clips.csv --model llava-v1.6-mistral-7b --frames 4 --out captioned.csv --device cuda
    python -m tools.caption clips.csv --model Qwen2.5-VL-7B --endpoint http://localhost:8000/v1 --out captioned.csv
    torchrun --nproc-per-node 8 -m tools.caption clips.csv --model llava-v1.6-mistral-7b --out captioned.csv --device cuda

Killed and started again, it resumes where it stopped. `--prompt` is video, image, short, refine, a .txt file or a text,
and may name columns: "Its title is {title}. Describe it." An endpoint's key is read from the environment.
"""

import argparse
import os
from collections.abc import Sequence

from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.caption.captioner import SCORES, Captioner
from tools.caption.prompts import TEMPLATES, prompt_of
from tools.command import Parser
from tools.scoring import job as jobs
from tools.scoring.__main__ import add_run_arguments, job_of
from tools.scoring.registry import Scorer


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    add_run_arguments(parser)
    parser.add_argument("--model", required=True, help="folder or hub id; with --endpoint, its name there")
    parser.add_argument(
        "--endpoint", default=Captioner.endpoint, metavar="URL", help="OpenAI-compatible, as http://localhost:8000/v1"
    )
    parser.add_argument("--key-env", default=Captioner.key_env, metavar="NAME", help="environment variable of its key")
    parser.add_argument("--timeout-s", type=float, default=Captioner.timeout_s, help="of a request")
    parser.add_argument("--prompt", default=Captioner.prompt, help=f"{', '.join(TEMPLATES)}, a .txt file or a text")
    parser.add_argument("--frames", type=int, default=Captioner.frames, help="of each clip, evenly spread")
    parser.add_argument("--long-side", type=int, default=Captioner.long_side, help="pixels that frames are shrunk to")
    parser.add_argument("--max-tokens", type=int, default=Captioner.max_tokens, help="of a caption")
    parser.add_argument("--retries", type=int, default=Captioner.retries, help="after an empty caption or an error")
    parser.add_argument("--column", default=Captioner.column, help="name of the new column")
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=[], help="put these behind the caption")
    parser.add_argument("--device", default=Captioner.device, help="cpu or cuda")
    parser.add_argument("--dtype", default=Captioner.dtype, help="auto, float32, bfloat16, float16")
    return parser.parse_args(argv)


def captioner_of(args: argparse.Namespace) -> Captioner:
    """The captioner of a command line.

    Raises:
        UserError: a number is too small, or a setting has no effect.
    """
    for name, least in (("frames", 1), ("long_side", 16), ("max_tokens", 1), ("retries", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}.")
    without_effect = ("device", "dtype") if args.endpoint else ("key_env", "timeout_s")
    for name in without_effect:
        if getattr(args, name) != getattr(Captioner, name):
            where = "with" if args.endpoint else "without"
            raise UserError(f"--{name.replace('_', '-')} has no effect {where} --endpoint.")
    prompt_of(args.prompt)
    fields = {name: getattr(args, name) for name in Captioner.__dataclass_fields__ if name != "scores"}
    return Captioner(**fields, scores=tuple(args.scores))


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    if os.environ.get("RANK", "0") == "0":
        show_messages()
    scorers: dict[str, Scorer] = {"caption": captioner_of(args)}
    jobs.run(job_of(args, scorers), args.num_workers)


if __name__ == "__main__":
    main()
