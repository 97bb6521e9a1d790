"""The Frechet distance of two sets of videos, by the features of a network: FID, FVD and their relatives.

    python -m tools.eval.frechet --real assets/clips/held_out.csv --fake outputs/samples --extractor transnetv2

Heusel et al. 2017, arXiv:1706.08500, eq. 6, of Gaussians fitted to features: d^2 = |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^1/2).
With Inception's features of frames it is called FID, with I3D's of clips FVD (Unterthiner et al. 2018, arXiv:1812.01717);
with the extractors that need no download it is neither, and only good for comparing runs of the same settings.
All in fp64; the covariance has N - 1 in the denominator.

Fewer samples than features make the covariances singular and the distance too large, by an amount that depends on the
number of samples: compare only equal numbers, and see `--save-statistics` for keeping the real side.
"""

import argparse
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from opensora.utils.errors import UserError, exit_on_user_error
from tools.eval.clips import Clip, Sampling, read_clips
from tools.eval.extractors import Extractor, add_arguments, build_extractor, sampling_of
from tools.eval.record import refuse_unwritable, score_record, write_record


class Gaussian(NamedTuple):
    """Mean [D], covariance [D, D], both fp64, the number of samples and, where that is known, of clips they are of."""

    mean: Tensor
    covariance: Tensor
    samples: int
    clips: int | None = None


def fit(features: Tensor, clips: int | None = None) -> Gaussian:
    """The Gaussian of features [N, D] of some clips.

    Raises:
        UserError: fewer than two samples have no covariance.
    """
    count, dim = features.shape
    if count < 2:
        raise UserError(f"{count} sample(s): a covariance needs at least 2. Give more videos, or more frames of each.")
    if count <= dim:
        warnings.warn(
            f"{count} samples of {dim} features: the covariance is singular and the distance too large. Compare it only with "
            "distances of as many samples.",
            stacklevel=2,
        )
    x = features.double()
    if not x.isfinite().all():
        raise UserError("features are not finite; the extractor does not take these videos.")
    mean = x.mean(0)
    centred = x - mean
    return Gaussian(mean, centred.T @ centred / (count - 1), count, clips)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """The squared distance, as FID and FVD are published.

    tr (S1 S2)^1/2 is the sum of the singular values of S1^1/2 S2^1/2, roots of symmetric matrices: no complex numbers
    appear and nothing has to be added to a singular covariance, as with a general matrix root.
    """
    if a.mean.shape != b.mean.shape:
        raise UserError(f"features of sizes {len(a.mean)} and {len(b.mean)} are of different extractors.")
    cross = torch.linalg.svdvals(_root(a.covariance) @ _root(b.covariance)).sum()
    difference = (a.mean - b.mean).square().sum()
    return float(difference + a.covariance.trace() + b.covariance.trace() - 2 * cross)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric root of a symmetric matrix without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.T


@torch.no_grad()
def features_of(
    clips: Iterable[Clip], extractor: Extractor, batch_size: int, device: str = "cpu"
) -> tuple[Tensor, int]:
    """Features [N, D] of all clips, on the CPU, and the number of clips.

    Raises:
        UserError: clips of another size, which `--resize none` lets through, have another number of features.
    """
    rows: list[Tensor] = []
    count = 0
    for batch in _batches(clips, batch_size):
        features = extractor(torch.stack([clip.video for clip in batch]).to(device)).cpu()
        if rows and features.shape[1] != rows[0].shape[1]:
            height, width = batch[0].video.shape[-2:]
            raise UserError(
                f"{batch[0].path} is {height}x{width} and has {features.shape[1]} features, the clips before it are of another "
                f"size and have {rows[0].shape[1]}. {extractor.name} needs one size: choose a --resize other than none."
            )
        rows.append(features)
        count += len(batch)
    return torch.cat(rows), count


def _batches(clips: Iterable[Clip], batch_size: int) -> Iterator[list[Clip]]:
    """Clips in their order, as many as fit and of one size."""
    batch: list[Clip] = []
    for clip in clips:
        if batch and (len(batch) == batch_size or clip.video.shape != batch[0].video.shape):
            yield batch
            batch = []
        batch.append(clip)
    if batch:
        yield batch


def save_statistics(path: Path, gaussian: Gaussian, settings: dict[str, Any]) -> None:
    """Keep one side's Gaussian, with the settings it holds for.

    Raises:
        UserError: the file cannot be written.
    """
    header = {"count": str(gaussian.samples), "settings": _text(settings)}
    if gaussian.clips is not None:
        header["clips"] = str(gaussian.clips)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"mean": gaussian.mean, "covariance": gaussian.covariance}, path, metadata=header)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be written ({error}). Choose another --save-statistics.") from error


def load_statistics(path: Path, settings: dict[str, Any]) -> Gaussian:
    """The Gaussian of `save_statistics`.

    Raises:
        UserError: it is no such file, or was made with other settings.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            mean, covariance, count = file.get_tensor("mean"), file.get_tensor("covariance"), int(header["count"])
            clips = int(header["clips"]) if "clips" in header else None  # older files do not have it
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} holds no statistics of --save-statistics: {error}") from error
    if header["settings"] != _text(settings):
        raise UserError(f"{path} is of other settings: {header['settings']}; now {_text(settings)}.")
    return Gaussian(mean, covariance, count, clips)


def _text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={settings[key]}" for key in sorted(settings))


def _side(source: Path, args: argparse.Namespace, extractor: Extractor, sampling: Sampling) -> Gaussian:
    """The Gaussian of a folder or table, or of a file of statistics."""
    if source.suffix == ".safetensors":  # whose clips cannot be made fewer afterwards
        kept = load_statistics(source, side_settings(extractor, sampling))
        if args.num_samples is not None and args.num_samples != kept.clips:
            of = "an unknown number of clips" if kept.clips is None else f"{kept.clips} clips"
            raise UserError(
                f"--num-samples {args.num_samples} does not fit {source}, which holds the statistics of {of}. Leave "
                "--num-samples out, or make the statistics again with it."
            )
        return kept
    clips = read_clips(source, sampling, args.root, args.num_samples)
    features, count = features_of(clips, extractor, args.batch_size, args.device)
    if args.num_samples is not None and count < args.num_samples:
        warnings.warn(f"{source} has only {count} clips, --num-samples asks for {args.num_samples}.", stacklevel=2)
    print(f"{source}: {count} clips, {len(features)} features of size {features.shape[1]}")
    return fit(features, count)


def side_settings(extractor: Extractor, sampling: Sampling) -> dict[str, Any]:
    """What the features of one side depend on, besides the clips."""
    return {"extractor": extractor.name, "extractor_hash": extractor.fingerprint, **sampling._asdict()}


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="folder, table, or a file of --save-statistics")
    parser.add_argument("--fake", type=Path, required=True, help="folder or table of samples")
    parser.add_argument("--root", type=Path, help="folder that a table's paths are relative to; default: its own")
    parser.add_argument(
        "--num-samples", type=int, help="clips of each side, of statistics the number that they hold; default: all"
    )
    parser.add_argument(
        "--real-frame-interval",
        type=int,
        help="every n-th frame of the real clips, where they have more frames a second than the samples",
    )
    parser.add_argument("--save-statistics", type=Path, help="keep the real side as FILE.safetensors")
    parser.add_argument("--out", type=Path, help="write score and settings to this JSON file")
    add_arguments(parser)
    return parser.parse_args(argv)


@exit_on_user_error
def main() -> None:
    """Measure and print."""
    args = read_arguments()
    for name in ("num_samples", "batch_size", "num_frames", "frame_interval", "real_frame_interval"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if args.size is not None and min(args.size) < 1:
        raise UserError(f"--size {args.size[0]} {args.size[1]}: height and width must be at least 1.")
    refuse_unwritable(args.out)
    refuse_unwritable(args.save_statistics, "--save-statistics")
    extractor = build_extractor(args)
    sampling = sampling_of(args, extractor)
    real_sampling = sampling._replace(frame_interval=args.real_frame_interval or sampling.frame_interval)
    real = _side(args.real, args, extractor, real_sampling)
    fake = _side(args.fake, args, extractor, sampling)
    if args.save_statistics is not None:
        save_statistics(args.save_statistics, real, side_settings(extractor, real_sampling))
    distance = frechet_distance(real, fake)
    print(
        f"Frechet distance ({extractor.name}): {distance:.4f}, {real.samples} real and {fake.samples} generated features"
    )
    if args.out is not None:
        settings = side_settings(extractor, sampling) | {"real_frame_interval": real_sampling.frame_interval}
        sides = {"real": args.real, "fake": args.fake, "real_count": real.samples, "fake_count": fake.samples}
        write_record(args.out, score_record("frechet", {"frechet_distance": distance}, settings | sides))


if __name__ == "__main__":
    main()
