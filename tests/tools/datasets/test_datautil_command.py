"""The command line: several tables, paths that stay true, outputs that replace nothing, and what the output is called."""

import os

import pytest

from opensora.datasets.table.files import read_frame
from opensora.datasets.table.table import read_table
from opensora.utils.errors import UserError
from tools.datasets.datautil.__main__ import read_arguments, run


def test_operations_come_in_the_order_of_the_command_line():
    args = read_arguments(
        ["a.csv", "b.csv", "--head", "9", "--info", "--fmin", "16", "--head", "3", "--stats", "--dedupe", "text"]
    )
    assert args.tables == ["a.csv", "b.csv"]
    assert args.steps == [("head", 9), ("info", True), ("fmin", 16.0), ("head", 3), ("stats", []), ("dedupe", "text")]


def test_tables_from_several_folders_still_name_the_same_files(tmp_path, write_table, datautil):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.mp4").write_bytes(folder.encode())
        write_table(
            [{"path": "a.mp4", folder: "1"}, {"path": str(tmp_path / folder / "a.mp4"), folder: ""}], f"{folder}/t.csv"
        )
    frame = datautil(tmp_path / "*/t.csv", output=tmp_path / "new" / "all.csv")
    table = read_table(tmp_path / "new" / "all.csv", text_columns=())
    assert [table.path(row).read_text() for row in range(4)] == ["one", "one", "two", "two"]
    assert frame.columns.tolist() == ["path", "one", "two"]
    assert frame["one"].tolist() == ["1", "", "", ""]
    again = datautil(tmp_path / "new/all.csv", "--remove-path-duplication", output=tmp_path / "unique.csv")
    assert again["path"].tolist() == ["one/a.mp4", "two/a.mp4"]


def test_a_root_leaves_paths_alone(tmp_path, write_table, datautil, capsys):
    (tmp_path / "media").mkdir()
    (tmp_path / "media/a.mp4").touch()
    table = write_table([{"path": "a.mp4"}, {"path": "b.mp4"}], "tables/t.csv")
    frame = datautil(table, "--root", tmp_path / "media", "--ext", output=tmp_path / "o.csv")
    assert frame["path"].tolist() == ["a.mp4"]
    assert f"pass --root {tmp_path / 'media'}" in capsys.readouterr().out


def test_absolute_and_relative_paths(tmp_path, write_table, datautil, capsys):
    table = write_table([{"path": "x/a.mp4"}, {"path": "/data/b.mp4"}, {"path": "https://x.org/c.mp4"}])
    assert datautil(table, "--abspath", output=tmp_path / "1.csv")["path"].tolist() == [
        str(tmp_path / "x/a.mp4"), "/data/b.mp4", "https://x.org/c.mp4"
    ]  # fmt: skip
    (tmp_path / "x").mkdir()
    frame = datautil(table, "--abspath", "--relpath", tmp_path / "x", "--path-to-id", output=tmp_path / "2.csv")
    assert frame["path"].tolist() == ["a.mp4", os.path.relpath("/data/b.mp4", tmp_path / "x"), "https://x.org/c.mp4"]
    assert frame["id"].tolist() == ["a", "b", "c"]
    assert f"pass --root {tmp_path / 'x'}" in capsys.readouterr().out
    with pytest.raises(UserError, match="--relpath nowhere: nowhere is no folder"):
        datautil(table, "--relpath", "nowhere", output=tmp_path / "3.csv")


def test_other_tables(tmp_path, write_table, datautil, capsys):
    ours = write_table([{"path": f"{name}.mp4", "text": name} for name in "abc"])
    theirs = write_table(
        [{"path": "../b.mp4", "text": "B", "aes": "5"}, {"path": "../c.mp4", "text": "", "aes": "6"},
         {"path": "../c.mp4", "text": "late", "aes": "7"}, {"path": "../d.mp4", "text": "D", "aes": "8"}],
        "other/o.csv",
    )  # fmt: skip
    assert datautil(ours, "--difference", theirs, output=tmp_path / "1.csv").to_dict("list") == {
        "path": ["a.mp4"],
        "text": ["a"],
    }
    both = datautil(ours, "--intersection", theirs, output=tmp_path / "2.csv")
    assert both.to_dict("list") == {"path": ["b.mp4", "c.mp4"], "text": ["b", "c"], "aes": ["5", "6"]}
    assert "1 rows of the other table name a file again" in capsys.readouterr().out
    merged = datautil(ours, "--merge", theirs, output=tmp_path / "3.csv")
    assert merged["aes"].tolist() == ["", "5", "6"]
    updated = datautil(ours, "--update-text", theirs, output=tmp_path / "4.csv")
    assert updated["text"].tolist() == ["a", "B", "c"]
    assert "1 captions changed, 2 files have none in o.csv" in capsys.readouterr().out


def test_merged_numbers_stay_numbers(tmp_path, write_table, datautil):
    table = write_table([{"path": "a", "num_frames": 3}, {"path": "b", "num_frames": ""}])
    typed = datautil(table, output=tmp_path / "t.jsonl")
    assert str(typed["num_frames"].dtype) == "Int64"
    both = datautil(tmp_path / "t.jsonl", write_table([{"path": "c"}], "c.csv"), output=tmp_path / "u.jsonl")
    assert both["num_frames"].tolist()[0] == 3
    assert both["num_frames"].isna().tolist() == [False, True, True]


def test_a_table_is_replaced_only_when_asked_for(tmp_path, write_table, datautil):
    table = write_table([{"path": "a"}, {"path": "b"}])
    with pytest.raises(UserError, match="is an input; name another"):
        datautil(table, "--head", 1, output=table)
    (tmp_path / "x.csv").write_text("before")
    with pytest.raises(UserError, match="exists; name another"):
        datautil(table, "--head", 1, output=tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "before"
    assert len(datautil(table, "--head", 1, "--overwrite", output=table)) == 1


def test_nothing_is_written_when_an_operation_fails(tmp_path, write_table, datautil):
    table = write_table([{"path": "a", "aes": "1"}])
    for argv, message in [
        (["--aesmin", 5], "0 rows are left"),
        (["--fmin", 5], "no column 'num_frames'"),
        (["--shard", 2], "1 rows are left, which do not fill 2"),
    ]:
        with pytest.raises(UserError, match=message):
            datautil(table, *argv, output=tmp_path / "o.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_shards(tmp_path, write_table):
    table = write_table([{"path": str(i)} for i in range(11)])
    written = run([str(table), "--sort-ascending", "path", "--shard", "3", "--output", str(tmp_path / "p.parquet")])
    assert [path.name for path in written] == ["p_0.parquet", "p_1.parquet", "p_2.parquet"]
    frames = [read_frame(path)["path"].tolist() for path in written]
    assert [len(frame) for frame in frames] == [3, 4, 4]
    assert [int(name) for frame in frames for name in frame] == list(range(11))


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--fmin", "2", "--head", "3"], "t_fmin2_head3.csv"),
        (["--aesmin", "4.5", "--format", "jsonl"], "t_aesmin4.5.jsonl"),
        (
            ["--extensions", ".mp4", ".mov", "--sort", "aes", "--remove-text-duplication"],
            "t_mp4-mov_sort_aes_uniquetext.csv",
        ),
        (["--format", "parquet"], "t.parquet"),
    ],
)
def test_an_output_without_a_name_is_named_after_what_was_done(tmp_path, write_table, argv, name):
    table = write_table([{"path": "a.mp4", "text": "x", "num_frames": 3, "aes": 5}])
    assert run([str(table), *argv]) == [tmp_path / name]


def test_figures_alone_write_nothing(tmp_path, write_table, capsys):
    table = write_table([{"path": "a.mp4", "text": "x"}])
    assert run([str(table), "--stats", "text"]) == []
    assert "text: 1 filled" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UserError, match="nothing to do"):
        run([str(table)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", "3", "--head", "1"], "--seed has no effect"),
        (["--format", "csv", "--output", "x.jsonl"], "contradicts --output"),
        (["--output", "x.txt"], "is no table"),
        (["--root", "nowhere", "--head", "1"], "nowhere is no folder"),
    ],
)
def test_a_setting_without_effect_is_an_error(write_table, argv, message):
    table = write_table([{"path": "a"}])
    with pytest.raises(UserError, match=message):
        run([str(table), *argv])


def test_misspelt_inputs(tmp_path, write_table):
    write_table([{"path": "a"}])
    with pytest.raises(UserError, match=r"Did you mean 't\.csv'"):
        run([str(tmp_path / "tt.csv"), "--head", "1"])
    with pytest.raises(SystemExit):
        run([str(tmp_path / "t.csv"), "--fmn", "1"])


def test_a_table_named_twice_is_read_once(tmp_path, write_table, datautil):
    table = write_table([{"path": "a"}])
    assert len(datautil(table, tmp_path / "*.csv", output=tmp_path / "o" / "o.csv")) == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_the_program_ends_with_a_message(run_script, tmp_path, write_table):
    table = write_table([{"path": "a", "aes": 3}, {"path": "b", "aes": 5}])
    done = run_script(
        "-m", "tools.datasets.datautil", table, "--aesmin", "4", "--fmin", "3", "--output", tmp_path / "o.csv"
    )
    assert done.code == 2
    assert "--aesmin 4: 2 -> 1 rows (dropped: 1 with aes < 4)" in done.stdout
    assert "error: --fmin 3: there is no column 'num_frames'." in done.stderr


def test_links_among_folders_do_not_hide_that_files_are_one(tmp_path, write_table, datautil):
    (tmp_path / "disk" / "set").mkdir(parents=True)
    (tmp_path / "disk" / "a.mp4").touch()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "set")
    table = write_table([{"path": "../a.mp4"}, {"path": str(tmp_path / "disk/a.mp4")}, {"path": "b.mp4"}], "link/t.csv")
    frame = datautil(table, "--remove-path-duplication", "--ext", output=tmp_path / "o.csv")
    assert frame["path"].tolist() == ["disk/a.mp4"]
    frame = datautil(table, "--abspath", "--ext", output=tmp_path / "p.csv")
    assert frame["path"].tolist() == [str(tmp_path / "disk/a.mp4")] * 2
    frame = datautil(table, "--relpath", tmp_path / "link", "--ext", output=tmp_path / "q.csv")
    assert frame["path"].tolist() == ["../a.mp4"] * 2
