"""VBench (Huang et al. 2024, arXiv:2311.17982): its prompts as prompt lists, samples under its names, its scores as a record.

    python -m tools.eval.vbench prompts VBench_full_info.json --out prompts/           # what to sample, and how often
    python -m tools.eval.vbench layout outputs/vbench --info VBench_full_info.json --out vbench_videos/
    python -m tools.eval.vbench import evaluation_results/ --out scores.json           # what its evaluate.py wrote

VBench itself is installed and run as its own README says; nothing of it is needed here. It finds videos by name,
`PROMPT-K.mp4` with K from 0: 5 of each prompt, 25 where temporal flickering is measured, since its static videos are
filtered first. The total is the mean of normalized dimensions, quality weighing 4 and semantics 1, as on its leaderboard.
"""

import argparse
import csv
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opensora.inference.manifest import Finished, finished
from opensora.inference.prompts import without_scores
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.folders import make_writable, parse_json
from tools.command import Parser
from tools.eval.record import refuse_unwritable, score_record, write_record

SAMPLES, SAMPLES_OF_FLICKER = 5, 25
FLICKER = "temporal_flickering"
QUALITY_WEIGHT, SEMANTIC_WEIGHT = 4, 1
LONGEST_NAME = 255  # bytes, of common file systems


class Dimension(NamedTuple):
    """How a score becomes a number between 0 and 1, and what it counts for."""

    lowest: float
    highest: float
    weight: float = 1.0


# lowest and highest are those of VBench's leaderboard: what natural and empirical extremes scored
QUALITY = {
    "subject_consistency": Dimension(0.1462, 1.0),
    "background_consistency": Dimension(0.2615, 1.0),
    "temporal_flickering": Dimension(0.6293, 1.0),
    "motion_smoothness": Dimension(0.706, 0.9975),
    "aesthetic_quality": Dimension(0.0, 1.0),
    "imaging_quality": Dimension(0.0, 1.0),
    "dynamic_degree": Dimension(0.0, 1.0, weight=0.5),
}
SEMANTIC = {
    "object_class": Dimension(0.0, 1.0),
    "multiple_objects": Dimension(0.0, 1.0),
    "human_action": Dimension(0.0, 1.0),
    "color": Dimension(0.0, 1.0),
    "spatial_relationship": Dimension(0.0, 1.0),
    "scene": Dimension(0.0, 0.8222),
    "appearance_style": Dimension(0.0009, 0.2855),
    "temporal_style": Dimension(0.0, 0.364),
    "overall_consistency": Dimension(0.0, 0.364),
}
DIMENSIONS = QUALITY | SEMANTIC


class Prompt(NamedTuple):
    """A prompt of the benchmark, what is measured on its videos, and how many of these there must be."""

    text: str
    dimensions: tuple[str, ...]
    samples: int


def read_info(path: Path, dimensions: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of VBench's list, each once, in its order; only those of some dimensions, if any are named.

    Raises:
        UserError: the file is another, or a dimension is unknown.
    """
    for name in dimensions:
        if name not in DIMENSIONS:
            raise UserError(f"--dimension {name}: unknown. Choices: {', '.join(DIMENSIONS)}.")
    measured: dict[str, list[str]] = {}
    try:
        for entry in parse_json(path.read_text(encoding="utf-8")):
            measured.setdefault(entry["prompt_en"], []).extend(entry["dimension"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no list of VBench, such as VBench_full_info.json: {error!r}.") from error
    prompts = []
    for text, names in measured.items():
        wanted = tuple(dict.fromkeys(name for name in names if not dimensions or name in dimensions))
        if wanted:
            prompts.append(Prompt(text, wanted, SAMPLES_OF_FLICKER if FLICKER in wanted else SAMPLES))
    if not prompts:
        raise UserError(f"{path} has no prompts of {', '.join(dimensions) or 'any dimension'}.")
    return prompts


def write_prompts(prompts: Sequence[Prompt], out: Path) -> dict[int, Path]:
    """One table a number of samples, for `scripts/inference.py --prompt-path TABLE --num-sample N`."""
    make_writable(out, "out")
    tables = {}
    for samples in sorted({prompt.samples for prompt in prompts}):
        path = out / f"prompts-{samples}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["text", "dimensions"])
            writer.writerows([p.text, " ".join(p.dimensions)] for p in prompts if p.samples == samples)
        tables[samples] = path
    return tables


def lay_out(folders: Sequence[Path], prompts: Sequence[Prompt], out: Path) -> list[dict[str, Any]]:
    """Link (or copy) samples into `out/PROMPT-K.mp4`; returns what each was made from.

    Raises:
        UserError: some are missing, which VBench would not mention, or there twice, or a prompt cannot be a file name.
    """
    wanted = {(prompt.text, k) for prompt in prompts for k in range(prompt.samples)}
    found: dict[tuple[str, int], Finished] = {}
    for sample in (sample for folder in folders for sample in finished(folder)):
        k = sample.record["sample_index"]
        # as it stands, and without scores (`--aes`), which VBench's list does not have
        for text in {sample.record["prompt"], without_scores(sample.record["prompt"])}:
            first = found.setdefault((text, k), sample) if (text, k) in wanted else sample
            if first.path.resolve() != sample.path.resolve():  # the same folder may be named twice
                raise UserError(
                    f"{first.path} and {sample.path} are both number {k} of {text!r}, and VBench measures one. Leave one of "
                    "the folders out, or move one of the files away."
                )
    if others := sorted({sample.path.suffix for sample in found.values()} - {".mp4"}):
        raise UserError(f"samples are {', '.join(others)} files; VBench takes mp4: sample with --save-format mp4.")
    if missing := wanted - found.keys():
        text, k = min(missing)
        raise UserError(
            f"{len(missing)} of {len(wanted)} samples are missing, such as number {k} of {text!r}: VBench would measure "
            "without them and say nothing. Sample them, or choose dimensions with --dimension."
        )
    make_writable(out, "out")
    rows = []
    for (text, k), sample in sorted(found.items()):
        if "/" in text or "\0" in text or len(f"{text}-00.mp4".encode()) > LONGEST_NAME:
            raise UserError(f"VBench finds videos by name, and {text!r} cannot be one (a slash, or too long).")
        _link(sample.path, out / f"{text}-{k}.mp4")
        keys = ("prompt_index", "sample_index", "seed", "image_size", "num_frames", "save_fps", "checkpoint")
        rows.append({"prompt": text, "k": k, "file": str(sample.path), **{key: sample.record[key] for key in keys}})
    return rows


def read_scores(source: Path) -> dict[str, float]:
    """The score of each dimension, from one of VBench's result files or all of a folder.

    Raises:
        UserError: there is none, or two files disagree.
    """
    scores: dict[str, float] = {}
    for path in sorted(source.rglob("*.json")) if source.is_dir() else [source]:
        for name, score in _read_result(path).items():
            if scores.setdefault(name, score) != score:
                raise UserError(f"{path}: {name} is {score}, in another file of {source} it is {scores[name]}.")
    if not scores:
        raise UserError(f"{source} holds no results of VBench, such as NAME_eval_results.json.")
    return scores


def totals(scores: Mapping[str, float]) -> dict[str, float]:
    """`quality`, `semantic` and `total`, each where all of its dimensions were measured."""
    result = {}
    for name, group in (("quality", QUALITY), ("semantic", SEMANTIC)):
        if group.keys() <= scores.keys():
            parts = [d.weight * (scores[key] - d.lowest) / (d.highest - d.lowest) for key, d in group.items()]
            result[name] = sum(parts) / sum(d.weight for d in group.values())
    if len(result) == 2:
        weighted = QUALITY_WEIGHT * result["quality"] + SEMANTIC_WEIGHT * result["semantic"]
        result["total"] = weighted / (QUALITY_WEIGHT + SEMANTIC_WEIGHT)
    return result


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    if target.exists():
        if target.stat().st_size == source.stat().st_size and target.read_bytes() == source.read_bytes():
            return
        raise UserError(f"{target} is there already, with another content. Choose another --out.")
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _read_result(path: Path) -> dict[str, float]:
    """Of a file {dimension: [score, details]}; of any other, nothing."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        return {}
    scores = {}
    for name, value in content.items():
        name = name.replace(" ", "_")
        if name in DIMENSIONS and isinstance(value, list):
            try:
                scores[name] = float(value[0])
            except (IndexError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path}: {name} does not begin with a score; VBench was interrupted, or found no videos. Measure it "
                    "again, or remove it from the file."
                ) from error
    return scores


def _prompts(args: argparse.Namespace) -> None:
    prompts = read_info(args.info, args.dimension)
    for samples, table in write_prompts(prompts, args.out).items():
        print(
            f"python scripts/inference.py CONFIG --prompt-path {table} --num-sample {samples} --save-dir {table.stem}"
        )


def _layout(args: argparse.Namespace) -> None:
    folder = args.out.resolve() if args.out.name in ("", "..") else args.out
    record = folder.with_name(f"{folder.name}.json")
    refuse_unwritable(record)
    rows = lay_out(args.samples, read_info(args.info, args.dimension), args.out)
    write_record(record, score_record("vbench layout", {}, {"samples": rows}))
    print(f"{len(rows)} videos in {args.out}; what they were made from: {record}")


def _import(args: argparse.Namespace) -> None:
    scores = read_scores(args.results)
    for name, score in scores.items():
        print(f"{name:24} {100 * score:6.2f} %")
    for name, score in (total := totals(scores)).items():
        print(f"{name:24} {100 * score:6.2f} %  (normalized)")
    if "total" not in total:
        missing = ", ".join(name for name in DIMENSIONS if name not in scores)
        print(f"no total: not measured are {missing}")
    if args.out is not None:
        write_record(args.out, score_record("vbench", {**scores, **total}, {"results": args.results}))


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="write prompt lists")
    prompts.add_argument("info", type=Path, help="VBench_full_info.json")
    layout = commands.add_parser("layout", help="name samples as VBench wants them")
    layout.add_argument("samples", type=Path, nargs="+", help="folders of samples with sidecars")
    layout.add_argument("--info", type=Path, required=True, help="VBench_full_info.json")
    scores = commands.add_parser("import", help="read what VBench measured")
    scores.add_argument("results", type=Path, help="a result file, or a folder of them")
    scores.add_argument("--out", type=Path, help="write scores to this JSON file")
    for command in (prompts, layout):
        command.add_argument("--out", type=Path, required=True, help="folder to write to")
        command.add_argument("--dimension", nargs="+", default=[], help="only these")
    for command, run in ((prompts, _prompts), (layout, _layout), (scores, _import)):
        command.set_defaults(run=run)
    return parser.parse_args(argv)


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    args.run(args)


if __name__ == "__main__":
    main()
