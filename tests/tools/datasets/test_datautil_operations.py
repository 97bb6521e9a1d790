"""Operations do what they say, in the order in which they are given, and account for every row."""

import random
import re

import pytest

import tools.datasets.datautil.__main__  # noqa: F401  (operations register themselves)
from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import OPERATIONS

COLUMNS = {
    "fmin": "num_frames",
    "fmax": "num_frames",
    "hwmin": "resolution",
    "aesmin": "aes",
    "aesmax": "aes",
    "fpsmax": "fps",
}


def random_rows(rng: random.Random, count: int) -> list[dict[str, str]]:
    def cell(values):
        return "" if rng.random() < 0.2 else str(rng.choice(values))

    return [
        {
            "path": f"{rng.choice('ab')}/{rng.randrange(count)}{rng.choice(['.mp4', '.MOV', '.jpg', '', '.txt'])}",
            "text": cell(["a dog", "A DOG", "http://x.org", "two\nlines", " ", "NA"]),
            "num_frames": cell(range(40)),
            "resolution": cell([1e4, 1e5, 240.5]),
            "aes": cell([4.5, 5, 5.5, -1, "5.50"]),
            "fps": cell([24, 30, 29.97]),
        }
        for _ in range(count)
    ]


def number(row, column):
    return float(row[column]) if row[column] else None


def reference(rows, flag, value):
    """The operation once more, row by row."""
    if flag in COLUMNS:
        column = COLUMNS[flag]
        numbers = [(row, number(row, column)) for row in rows]
        if flag.endswith("min"):
            return [row for row, n in numbers if n is not None and n >= value]
        return [row for row, n in numbers if (n is None and flag == "fpsmax") or (n is not None and n <= value)]
    if flag in ("sort", "sort-ascending"):
        there = [row for row in rows if row[value]]
        key = (lambda row: row["text"]) if value in ("text", "path") else (lambda row: float(row[value]))
        return sorted(there, key=key, reverse=flag == "sort") + [row for row in rows if not row[value]]
    simple = {
        "head": lambda: rows[:value],
        "remove-empty-caption": lambda: [row for row in rows if row["text"].strip()],
        "remove-url": lambda: [row for row in rows if "http://" not in row["text"]],
        "img-only": lambda: [row for row in rows if row["path"].endswith(".jpg")],
        "vid-only": lambda: [row for row in rows if row["path"].endswith((".mp4", ".MOV"))],
        "extensions": lambda: [row for row in rows if row["path"].lower().endswith((".txt", ".mov"))],
        "path-subset": lambda: [row for row in rows if value in row["path"]],
    }
    return simple[flag]()


def first_rows(rows, column):
    seen = set()
    return [row for row in rows if not row[column] or not (row[column] in seen or seen.add(row[column]))]


def random_step(rng):
    flag = rng.choice(
        [*COLUMNS, "sort", "sort-ascending", "dedupe", "remove-text-duplication", "remove-path-duplication", "head",
         "remove-empty-caption", "remove-url", "img-only", "vid-only", "extensions", "path-subset"]
    )  # fmt: skip
    if flag in COLUMNS:
        return flag, rng.choice([0.0, 5.0, 12.0, 24.0, 1e4])
    values = {
        "sort": rng.choice(["aes", "num_frames", "text"]),
        "sort-ascending": rng.choice(["aes", "fps", "text"]),
        "dedupe": rng.choice(["aes", "num_frames"]),
        "head": rng.randrange(1, 60),
        "extensions": ["txt", ".MOV"],
        "path-subset": "a/1",
    }
    return flag, values.get(flag, True)


def counts_in(line):
    """(rows before, rows after, rows dropped by the sum of the reasons) of a line of the report."""
    before, after = map(int, re.search(r": (\d+) -> (\d+) rows", line).groups())
    reasons = re.search(r"rows \(dropped: (.*?)\)(?:;|$)", line, re.DOTALL)
    counts = [int(part.split()[0]) for part in reasons[1].split("; ")] if reasons else []
    return before, after, sum(counts)


@pytest.mark.parametrize("seed", range(60))
def test_a_list_of_operations_equals_the_reference_row_by_row(seed, do):
    rng = random.Random(seed)
    rows = random_rows(rng, rng.choice([1, 5, 200]))
    steps = [random_step(rng) for _ in range(rng.randrange(1, 7))]
    table, lines = do(rows, *steps)
    expected = rows
    for (flag, value), line in zip(steps, lines, strict=True):
        before = expected
        if flag in ("dedupe", "remove-text-duplication", "remove-path-duplication"):
            expected = first_rows(before, value if flag == "dedupe" else flag.split("-")[1])
        else:
            expected = reference(before, flag, value)
        assert counts_in(line) == (len(before), len(expected), len(before) - len(expected))
    assert table.frame.to_dict("records") == expected


def test_order_matters(do):
    rows = [{"path": str(i), "num_frames": str(n)} for i, n in enumerate([5, 50, 7, 70])]
    first, _ = do(rows, ("head", 2), ("fmin", 10.0))
    second, _ = do(rows, ("fmin", 10.0), ("head", 2))
    assert first.text("num_frames").tolist() == ["50"]
    assert second.text("num_frames").tolist() == ["50", "70"]


def test_sorting_is_stable_and_by_number(do):
    rows = [{"path": name, "aes": aes} for name, aes in [("a", "10"), ("b", "9"), ("c", ""), ("d", "10.0"), ("e", "9")]]
    down, lines = do(rows, ("sort", "aes"))
    up, _ = do(rows, ("sort-ascending", "aes"))
    assert down.text("path").tolist() == ["a", "d", "b", "e", "c"]
    assert up.text("path").tolist() == ["b", "e", "a", "d", "c"]
    assert lines == ["--sort aes: 5 -> 5 rows; sorted as numbers"]


def test_random_operations_follow_the_seed(do):
    rows = [{"path": str(i)} for i in range(50)]
    shuffled = [do(rows, ("shuffle", True), seed=seed)[0].text("path").tolist() for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0], key=int) == [str(i) for i in range(50)]
    drawn = [do(rows, ("sample", 7), seed=seed)[0].text("path").astype(int).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(row == sorted(row) and len(set(row)) == 7 for row in drawn)


def test_a_missing_column_has_a_suggestion(do):
    rows = [{"path": "a", "num_frame": "3"}]
    with pytest.raises(
        UserError, match=r"--fmin 3: there is no column 'num_frames'. Did you mean 'num_frame'\? --info"
    ):
        do(rows, ("fmin", 3.0))
    with pytest.raises(UserError, match=r"no column 'filesize'\. --filesize makes it"):
        do(rows, ("fsmax", 3.0))
    with pytest.raises(UserError, match="--sort num_frames: there is no column"):
        do(rows, ("sort", "num_frames"))


def test_a_cell_that_is_no_number_is_no_missing_one(do):
    with pytest.raises(UserError, match="num_frames: 'many' in row 2 is not a number"):
        do([{"path": "a", "num_frames": "3"}, {"path": "b", "num_frames": "many"}], ("fmin", 3.0))


def test_columns(do):
    rows = [{"path": "a", "text": "x", "aes": "5", "num_frames": "3", "note": "n"}]
    assert list(do(rows, ("train-column", True))[0].frame) == ["path", "text", "num_frames"]
    assert list(do(rows, ("keep-columns", ["aes", "path"]))[0].frame) == ["aes", "path"]
    table, lines = do(rows, ("drop-columns", ["note", "aes"]), ("rename-columns", ["text=caption"]))
    assert list(table.frame) == ["path", "caption", "num_frames"]
    assert lines[0] == "--drop-columns note aes: 1 -> 1 rows; dropped columns: aes, note"
    with pytest.raises(UserError, match="two columns 'aes'"):
        do(rows, ("rename-columns", ["text=aes"]))
    with pytest.raises(UserError, match="Did you mean 'note'"):
        do(rows, ("drop-columns", ["notes"]))


def test_figures_name_captions_that_come_often(do):
    rows = [
        {"path": f"{i}.mp4", "text": "the same failed caption" if i < 3 else str(i), "aes": i or ""} for i in range(5)
    ]
    table, lines = do(rows, ("stats", []))
    assert table.frame.to_dict("records") == rows
    assert "path: 5 filled, 0 empty, 5 different; 5 x .mp4" in lines[0]
    assert "text: 5 filled, 0 empty, 3 different; 3 x the same failed caption" in lines[0]
    assert "aes: 4 filled, 1 empty, 4 different; least 1, median 2.5, mean 2.5, largest 4" in lines[0]


@pytest.mark.parametrize("flag", sorted(OPERATIONS))
def test_every_operation_says_what_it_is(flag):
    operation = OPERATIONS[flag]
    assert operation.help
    assert operation.group
    assert operation.suffix.count("{}") <= 1
