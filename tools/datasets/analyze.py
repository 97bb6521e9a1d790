"""Look at a table: sizes, lengths, rates, scores, and which buckets a training config would fill, as one HTML page.

    python -m tools.datasets.analyze clips.csv --output clips.html [--config TRAIN_CONFIG --processes 8]

Reads the table row by row; 4 bytes for each number are held.
"""

import contextlib
import html
from collections import Counter
from pathlib import Path

import numpy as np

from opensora.config.load import TrainConfig, parse_config
from opensora.datasets.dataloader import build_sampler
from opensora.datasets.summary import Summary, summarise
from opensora.registry import DATASETS, build_module
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import progress_bar
from tools.command import Parser
from tools.datasets.datautil.columns import shortened
from tools.datasets.doctor import REGISTRIES
from tools.datasets.plots import Figures, svg_bars, svg_histogram
from tools.footage.report import HEAD
from tools.footage.rows import Row, read_rows

MOST_WORDS = 30  # different values of a column of words, up to which they are counted


def page_of(table: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The page's text, and the numbers of each column.

    Raises:
        UserError: the table has no rows.
    """
    figures = Figures()
    words: dict[str, Counter[str]] = {}
    count = 0
    for count, row in enumerate(progress_bar(read_rows(table), desc="reading", unit="row", delay=1), start=1):  # noqa: B007  (it is the number of rows)
        more: Row = {}
        with contextlib.suppress(KeyError, TypeError, ValueError, ZeroDivisionError):  # an image, or no such columns
            more["seconds"] = float(row["num_frames"]) / float(row["fps"])
        if row.get("text"):
            more["words in text"] = len(str(row["text"]).split())
        figures.add({**row, **more})
        for name, value in row.items():
            counter = words.setdefault(name, Counter())
            if len(counter) <= MOST_WORDS and value not in (None, ""):
                counter[shortened(str(value))] += 1
    if not count:
        raise UserError(f"{table} has no rows.")
    numbers = {name: values for name, values in figures.numbers().items() if len(values)}
    parts = [HEAD, f"<h1>{html.escape(str(table))}</h1><p>{count} rows</p>"]
    parts += [svg_histogram(name, values) for name, values in numbers.items()]
    for name, counter in words.items():
        if name not in numbers and 1 <= len(counter) <= MOST_WORDS:
            parts.append(svg_bars(name, dict(counter.most_common())))
    return "".join(parts), numbers


def occupancy(config: Path, table: Path, processes: int) -> Summary:
    """What an epoch of a training config would be on the table.

    Raises:
        UserError: the config or the table is not as training needs it.
    """
    cfg = parse_config(TrainConfig, REGISTRIES, [str(config), f"--data-path={table}"])
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    sampler = build_sampler(
        dataset, cfg.batch_size, seed=cfg.seed, world_size=processes, tail=cfg.bucket_tail, order=cfg.bucket_order
    )
    return summarise(dataset, sampler, processes, cfg.accumulation_steps)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--output", "-o", type=Path, required=True, help="an .html")
    parser.add_argument("--config", type=Path, help="a training config: which of its buckets are filled")
    parser.add_argument("--processes", type=int, help="of that training (default 1)")
    args = parser.parse_args()
    if args.processes is not None and args.config is None:
        raise UserError("--processes has no effect without --config.")
    page, numbers = page_of(args.table)
    if args.config is not None:
        summary = occupancy(args.config, args.table, args.processes or 1)
        counts = {use.bucket.name: use.samples for use in summary.buckets}
        page += f"<h2>{html.escape(str(args.config))}</h2><pre>{html.escape(str(summary))}</pre>"
        page += svg_bars("samples in each bucket", counts) if counts else ""
        print(summary)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page, encoding="utf-8")
    print(f"{args.output}: {len(numbers)} histograms")


if __name__ == "__main__":
    main()
