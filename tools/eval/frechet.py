"""The Frechet distance of two sets of videos, by the features of a network: FID, FVD and their relatives.

    python -m tools.eval.frechet --real assets/clips/held_out.csv --fake outputs/samples --extractor transnetv2
    python -m tools.eval.frechet --real VIRTUAL_imagenet256_labeled.npz --fake samples.npz --extractor inception:FILE
    python -m tools.eval.frechet --fake outputs/samples --write-npz samples.npz

Heusel et al. 2017, arXiv:1706.08500, eq. 6, of Gaussians fitted to features: d^2 = |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^1/2).
With Inception's features of frames it is called FID, with I3D's of clips FVD (Unterthiner et al. 2018, arXiv:1812.01717);
with the extractors that need no download it is neither, and only good for comparing runs of the same settings.
All in fp64; the covariance has N - 1 in the denominator.

With `inception:FILE` it measures what the ADM evaluator does (openai/guided-diffusion): FID, sFID, Inception Score (Salimans et
al. 2016, arXiv:1606.03498; the mean over parts of 5,000), precision and recall (Kynkaanniemi et al. 2019, arXiv:1904.06991, k = 3).
A reference batch's `mu`, `sigma`, `mu_s` and `sigma_s` take the place of those of its images.

Fewer samples than features make the covariances singular and the distance too large, by an amount that depends on the
number of samples: compare only equal numbers, and see `--save-statistics` for keeping the real side.
"""

import argparse
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from opensora.inference.output import replace_file, to_uint8
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import progress_bar, show_messages
from tools.command import Parser
from tools.eval.clips import Clip, Sampling, npz_arrays, read_clips
from tools.eval.extractors import Extractor, add_arguments, build_extractor, sampling_of
from tools.eval.record import refuse_unwritable, score_record, write_record

STATISTICS = ("mu", "sigma", "mu_s", "sigma_s")  # of a reference batch: of pooled features, and of those of sFID
NEIGHBOURS, SPLIT = 3, 5000  # of precision and recall, and of the Inception Score


class Gaussian(NamedTuple):
    """Mean [D], covariance [D, D], both fp64, and, where known, the number of samples and of clips they are of."""

    mean: Tensor
    covariance: Tensor
    samples: int | None
    clips: int | None = None


class Side(NamedTuple):
    """What is known of one side: a Gaussian of features, of those of sFID, and the features [N, D] themselves."""

    gaussian: Gaussian
    spatial: Gaussian | None = None
    features: Tensor | None = None


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
    return max(0.0, float(difference + a.covariance.trace() + b.covariance.trace() - 2 * cross))


def inception_score(probabilities: Tensor) -> float:
    """exp(H(mean of p) - mean of H(p)) of class probabilities p [N, K], the mean over parts of `SPLIT`."""
    parts = [
        torch.special.entr(part.mean(0)).sum() - torch.special.entr(part).sum(1).mean()
        for part in probabilities.double().split(SPLIT)
    ]
    return float(torch.stack(parts).exp().mean())


def precision_recall(real: Tensor, fake: Tensor) -> tuple[float, float]:
    """Shares of fake features [N, D] inside the real manifold, and of real ones [M, D] inside the fake manifold.

    A manifold is a union of balls around features that reach to the k-th nearest other. In fp64, where the ADM evaluator
    takes distances in fp16: the third decimal may differ.

    Raises:
        UserError: a side has no k others.
    """
    if min(len(real), len(fake)) <= NEIGHBOURS:
        raise UserError(f"precision and recall need more than {NEIGHBOURS} samples on each side.")

    def parts(rows: Tensor) -> Iterable[Tensor]:
        return progress_bar(rows.split(1024), desc="precision and recall", unit="part", delay=1)

    def share(points: Tensor, manifold: Tensor) -> float:
        nearest = [torch.cdist(rows, manifold).kthvalue(NEIGHBOURS + 1).values for rows in parts(manifold)]
        inside = [(torch.cdist(rows, manifold) <= torch.cat(nearest)).any(1) for rows in parts(points)]
        return float(torch.cat(inside).double().mean())

    return share(fake.double(), real.double()), share(real.double(), fake.double())


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
    if gaussian.samples is None:
        raise UserError(f"--save-statistics {path}: the real side is a file of statistics already. Leave it out.")
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


def _side(source: Path, args: argparse.Namespace, extractor: Extractor, sampling: Sampling) -> Side:
    """What is known of a folder, a table or an `.npz`, or of a file of statistics."""
    if source.suffix == ".safetensors":  # whose clips cannot be made fewer afterwards
        kept = load_statistics(source, side_settings(extractor, sampling))
        if args.num_samples is not None and args.num_samples != kept.clips:
            of = "an unknown number of clips" if kept.clips is None else f"{kept.clips} clips"
            raise UserError(
                f"--num-samples {args.num_samples} does not fit {source}, which holds the statistics of {of}. Leave "
                "--num-samples out, or make the statistics again with it."
            )
        return Side(kept)
    known: dict[str, Gaussian] = {}
    if source.suffix == ".npz" and extractor.pooled is not None:
        stored = {k: torch.from_numpy(v).double() for k, v in npz_arrays(source, *STATISTICS).items()}
        known = {k: Gaussian(stored[k], stored[v], None) for k, v in (STATISTICS[:2], STATISTICS[2:]) if k in stored}
        if known and args.num_samples is not None:
            raise UserError(
                f"--num-samples does not fit {source}, which holds statistics of all its images: leave it out."
            )
        if known and "arr_0.npy" not in zipfile.ZipFile(source).namelist():
            return Side(known["mu"], known.get("mu_s"))
    clips = read_clips(source, sampling, args.root, args.num_samples)
    features, count = features_of(clips, extractor, args.batch_size, args.device)
    if args.num_samples is not None and count < args.num_samples:
        warnings.warn(f"{source} has only {count} clips, --num-samples asks for {args.num_samples}.", stacklevel=2)
    print(f"{source}: {count} clips, {len(features)} features of size {features.shape[1]}")
    if extractor.pooled is None:
        return Side(fit(features, count))
    if source.suffix != ".npz":  # samples in the order of their classes would have few in each part of the score
        features = features[torch.randperm(len(features), generator=torch.Generator().manual_seed(0))]
    pooled, rest = features[:, : extractor.pooled], features[:, extractor.pooled :]
    return Side(known.get("mu") or fit(pooled, count), known.get("mu_s") or fit(rest), pooled)


def measure(real: Side, fake: Side, extractor: Extractor) -> dict[str, float]:
    """The scores, of which those that the ADM evaluator has too need what only the extractor "inception" gives."""
    scores = {"frechet_distance": frechet_distance(real.gaussian, fake.gaussian)}
    if real.spatial is not None and fake.spatial is not None:
        scores["sfid"] = frechet_distance(real.spatial, fake.spatial)
    if fake.features is not None and extractor.probabilities is not None:
        scores["inception_score"] = inception_score(extractor.probabilities(fake.features))
    if real.features is not None and fake.features is not None:
        scores["precision"], scores["recall"] = precision_recall(real.features, fake.features)
    return scores


def write_npz(args: argparse.Namespace) -> None:
    """Write the samples' frames, shuffled with a fixed seed, as the ADM evaluator takes them.

    Raises:
        UserError: they have several sizes, or an option has no effect.
    """
    path = args.write_npz
    measures = args.out is not None or args.save_statistics is not None or args.real is not None
    if measures or path.suffix != ".npz" or (args.resize not in (None, "none") and args.size is None):
        raise UserError(
            f"--write-npz {path}: the name ends in .npz, nothing is measured (leave out --real, --out and "
            "--save-statistics), and --resize needs a --size."
        )
    sampling = sampling_of(args, Extractor("none", "none", (0, 0), torch.nn.Identity(), 1, "none"))
    frames = [frame for clip in read_clips(args.fake, sampling, args.root) for frame in to_uint8(clip.video)]
    count = args.num_samples or len(frames)
    if (sizes := len({frame.shape for frame in frames})) > 1 or count > len(frames):
        raise UserError(
            f"{args.fake} has {len(frames)} images of {sizes} sizes, asked for are {count} of one: --num-samples, --size."
        )
    images = np.stack([frames[i] for i in np.random.default_rng(0).permutation(len(frames))[:count]])
    replace_file(path, lambda file: np.savez(file, arr_0=images))
    print(f"{path}: {len(images)} images")


def side_settings(extractor: Extractor, sampling: Sampling) -> dict[str, Any]:
    """What the features of one side depend on, besides the clips."""
    return {"extractor": extractor.name, "extractor_hash": extractor.fingerprint, **sampling._asdict()}


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--real", type=Path, help="folder, table, .npz of images, or a file of --save-statistics")
    parser.add_argument("--fake", type=Path, required=True, help="folder, table or .npz of samples")
    parser.add_argument("--write-npz", type=Path, help="only write the samples' frames, for the ADM evaluator")
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
    show_messages()
    for name in ("num_samples", "batch_size", "num_frames", "frame_interval", "real_frame_interval"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if args.size is not None and min(args.size) < 1:
        raise UserError(f"--size {args.size[0]} {args.size[1]}: height and width must be at least 1.")
    refuse_unwritable(args.out)
    refuse_unwritable(args.save_statistics, "--save-statistics")
    refuse_unwritable(args.write_npz, "--write-npz")
    if args.write_npz is not None:
        write_npz(args)
        return
    if args.real is None:
        raise UserError("--real is missing: what the samples are compared with.")
    extractor = build_extractor(args)
    sampling = sampling_of(args, extractor)
    real_sampling = sampling._replace(frame_interval=args.real_frame_interval or sampling.frame_interval)
    real = _side(args.real, args, extractor, real_sampling)
    fake = _side(args.fake, args, extractor, sampling)
    if args.save_statistics is not None:
        save_statistics(args.save_statistics, real.gaussian, side_settings(extractor, real_sampling))
    scores = measure(real, fake, extractor)
    counts = [side.gaussian.samples or "all" for side in (real, fake)]  # of a reference batch, all that it was made of
    print(
        f"Frechet distance ({extractor.name}): {scores['frechet_distance']:.4f}, {counts[0]} real and {counts[1]} generated features"
    )
    for name in [*scores][1:]:
        print(f"{name}: {scores[name]:.4f}")
    if args.out is not None:
        settings = side_settings(extractor, sampling) | {"real_frame_interval": real_sampling.frame_interval}
        sides = {"real": args.real, "fake": args.fake, "real_count": counts[0], "fake_count": counts[1]}
        write_record(args.out, score_record("frechet", scores, settings | sides))


if __name__ == "__main__":
    main()
