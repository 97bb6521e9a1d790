"""Figures about captions: how long they are, how many are alike, empty or cut off.

python -m tools.caption.statistics captioned.csv --column text
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from opensora.datasets.table.files import cell_text
from opensora.utils.errors import exit_on_user_error
from tools.datasets.stream import read_blocks

SHOWN = 3  # of the most frequent captions
BINS = (0, 5, 10, 20, 40, 80, 160)  # words
END = re.compile(r"[.!?。！？…][\"')\]”’]*$")
ALPHABETS_WITHOUT_SPACES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")


def words_of(text: str) -> int:
    """How many words; of alphabets without spaces, characters."""
    return len(ALPHABETS_WITHOUT_SPACES.findall(text)) + len(ALPHABETS_WITHOUT_SPACES.sub(" ", text).split())


def report(captions: Iterable[str]) -> list[str]:
    """Lines of figures."""
    lengths: list[int] = []
    seen: Counter[str] = Counter()
    cut = 0
    for caption in captions:
        text = " ".join(caption.split())
        lengths.append(words_of(text))
        cut += bool(text) and END.search(text) is None
        seen[text] += 1
    total, empty = len(lengths), seen.pop("", 0)
    words = np.array([length for length in lengths if length])
    lines = [f"{total} captions, {empty} empty, {cut} without an end of a sentence"]
    if len(words):
        low, middle, high = np.percentile(words, (5, 50, 95))
        lines.append(
            f"words: least {words.min()}, 5 % {low:g}, median {middle:g}, mean {words.mean():.1f}, 95 % {high:g}, "
            f"largest {words.max()}"
        )
        counts = np.histogram(words, [*BINS, np.inf])[0]
        labels = [f"{a}-{b - 1}" for a, b in pairwise(BINS)] + [f"{BINS[-1]}+"]
        lines.append("words: " + ", ".join(f"{label}: {n}" for label, n in zip(labels, counts, strict=True) if n))
    repeated = {text: count for text, count in seen.items() if count > 1}
    lines.append(f"{len(seen)} different; {sum(repeated.values())} captions are there more than once")
    lines += [f"  {count} x {text[:80]}" for text, count in Counter(repeated).most_common(SHOWN)]
    return lines


@exit_on_user_error
def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--column", default="text")
    args = parser.parse_args()
    blocks = read_blocks(args.table, 1 << 14, [args.column])
    print("\n".join(report(cell_text(cell) for block in blocks for cell in block[args.column])))


if __name__ == "__main__":
    main()
