"""Columns of text: what was put in comes out, and worker processes share it."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from opensora.datasets.table.table import TextColumn, encode

TEXTS = ["", "a", "émoji 🎬", "two\nlines", "", "湖, at dawn", "\0", "z" * 1000, os.fsdecode(b"caf\xe9.png"), ""]
SHARING = """
import csv, gc, os, sys
from opensora.datasets.table.table import read_table

def private_dirty():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))

table = read_table(sys.argv[1], check_files=False)
strings = sum(len(table.name(row)) + len(table.captions(row)[0]) for row in range(len(table)))
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    gc.disable()  # a search for garbage would write to all that there is
    before = private_dirty()
    for row in range(len(table)):
        table.name(row), table.captions(row), table.where(row)  # Path interns its parts, in a table that grows
    print(private_dirty() - before, strings, flush=True)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("block", [1, 3, 65_536])
def test_texts_come_out_as_they_went_in(block):
    blocks = [encode(TEXTS[first : first + block]) for first in range(0, len(TEXTS), block)]
    column = TextColumn(pa.chunked_array(blocks))
    assert len(column) == len(TEXTS)
    assert column.tolist() == list(column) == [column[row] for row in range(len(column))] == TEXTS
    with pytest.raises(IndexError):
        column[len(TEXTS)]
    assert pickle.loads(pickle.dumps(column)).tolist() == TEXTS  # to workers that are spawned
    assert TextColumn.of(iter(TEXTS)).tolist() == TEXTS
    assert TextColumn.of([]).tolist() == []


def test_some_of_the_texts():
    column, rng = TextColumn.of(TEXTS), random.Random(0)
    for _ in range(20):
        kept = np.array([rng.random() < 0.5 for _ in TEXTS])
        texts = [text for text, keep in zip(TEXTS, kept, strict=True) if keep]
        assert column.only(kept).tolist() == texts
        assert column.only(kept).only(np.zeros(kept.sum(), bool)).tolist() == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells a process's own pages")
def test_a_forked_worker_that_reads_all_rows_shares_them(tmp_path, repo_root):
    """Python strings took 1.35 times their length in each worker: reading one changes its reference count."""
    letters = random.Random(0).choices("abcdefgh ", k=200_000)
    table = tmp_path / "clips.csv"
    with table.open("w") as file:
        file.write("path,text\n")
        for i in range(100_000):
            file.write(f"folder/{i:07d}.mp4,{''.join(letters[i : i + 110])}\n")
    command = [sys.executable, "-c", SHARING, str(table)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    own, strings = map(int, done.stdout.split())
    assert strings > 12e6
    assert own < strings / 3
