import pytest

from opensora.inference.prompts import load_prompts
from opensora.utils.errors import UserError


def test_text_file_skips_blanks_and_comments_and_reads_utf8(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff# two lakes\r\n\r\n  a calm lake \r\n   \n平静的湖 🌅\n#c\na # inside".encode())
    assert load_prompts(None, file) == ["a calm lake", "平静的湖 🌅", "a # inside"]


def test_csv_takes_column_text_verbatim(tmp_path):
    file = tmp_path / "prompts.csv"
    file.write_text('path,text\na.mp4,"a cat, ""loud"",\nand wet"\nb.mp4,# None\nc.mp4,NA\nd.mp4,  x \ne.mp4,\n')
    assert load_prompts(None, str(file)) == ['a cat, "loud",\nand wet', "# None", "NA", "  x ", ""]


def test_prompt_wins_and_is_verbatim(tmp_path):
    assert load_prompts([" # a", "b"], tmp_path / "missing.txt") == [" # a", "b"]
    assert load_prompts("one", None) == ["one"]


def test_slice(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("a\n# no prompt\nb\nc\nd\n")
    assert load_prompts(None, file, 1, 3) == ["b", "c"]
    assert load_prompts(None, file, None, 99) == ["a", "b", "c", "d"]
    assert load_prompts(["a", "b"], None, 1, None) == ["b"]


def test_every_mistake_is_told(tmp_path):
    (tmp_path / "empty.txt").write_text("\n# only a comment\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "none.csv").write_text("path,caption\na,b\n")
    (tmp_path / "quote.csv").write_text('text\n"a"b\n')
    (tmp_path / "two.txt").write_text("a\nb\n")
    for path, start, end, message in [
        (None, None, None, "--prompt-path"),
        ("missing.txt", None, None, "no such file"),
        ("empty.txt", None, None, "no prompt"),
        ("latin.txt", None, None, "UTF-8"),
        ("none.csv", None, None, "caption"),
        ("quote.csv", None, None, "after line 1"),
        ("two.txt", 2, None, "numbered 0 to 1"),
        ("two.txt", 1, 1, "numbered 0 to 1"),
        ("two.txt", -1, None, "counted from 0"),
    ]:
        with pytest.raises(UserError, match=message):
            load_prompts(None, path and tmp_path / path, start, end)
    with pytest.raises(UserError, match="no prompt"):
        load_prompts([], None)
