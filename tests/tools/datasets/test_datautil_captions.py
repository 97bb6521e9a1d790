"""Captions: cleaning keeps what people wrote, and doing it twice changes nothing."""

import random
import sys
import time
from pathlib import Path

import pytest

from opensora.datasets.table.files import read_frame
from opensora.inference import prompts
from opensora.utils.errors import UserError
from tools.datasets.datautil import captions
from tools.datasets.datautil.captions import clean, refine, with_scores

CLEAN = {
    "A dog &amp;amp; a cat": "A dog & a cat",
    "<p>A <b>red</b>&nbsp;car</p>": "A red car",
    "see https://x.org/a?b=c now": "see now",
    "www.example.com A lake": "A lake",
    "mail me@x.org please": "mail please",
    "IMG_1234.jpg": "",
    "Sunset #nofilter @anna at 5 #1": "Sunset at 5 #1",
    "schÃ¶n": "schön",
    "two\n\n lines\tand  spaces": "two lines and spaces",
    "“quoted” ’tis": '"quoted" \'tis',
    "what?? !!! yes": "what?! yes",
    "a , b . c": "a, b. c",
    "雨の街 🌧️ Ünïcode": "雨の街 🌧️ Ünïcode",
    "5 < 6 and 7 > 3": "5 < 6 and 7 > 3",
    "NA": "NA",
    "": "",
}


@pytest.mark.parametrize("text", CLEAN)
def test_clean(text):
    assert clean(text) == CLEAN[text]


@pytest.mark.parametrize("seed", range(300))
def test_cleaning_and_refining_twice_change_nothing(seed):
    rng = random.Random(seed)
    snippets = [
        *CLEAN,
        "&lt;b&gt;",
        "&",
        ";",
        "<",
        ">",
        ".",
        "!!",
        "( )",
        "The video shows ",
        "In this video, ",
        "Sure! ",
        "#",
        "@",
        "`",
        "\\n",
    ]
    text = "".join(rng.choice(snippets) + rng.choice(["", " ", "\n"]) for _ in range(rng.randrange(1, 8)))
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    refined = refine(text)
    assert refine(refined) == refined


REFINED = {
    "The video shows a dog running. It is": "A dog running.",
    "In this video, we can see a lake.": "A lake.",
    "The video captures the image shows a cat": "A cat",
    "This aerial footage depicts a city.": "A city.",
    "Sure! Here is the caption: A horse.": "A horse.",
    "A video game plays on a screen.": "A video game plays on a screen.",
    "The dog shows its teeth.": "The dog shows its teeth.",
    "one unfinished sentence without": "One unfinished sentence without",
    'He says "stop!" Then he': 'He says "stop!"',
    "It costs 3.50 dollars. And th": "It costs 3.50 dollars.",
    "雨が降る。そして": "雨が降る。",
    "The video shows": "The video shows",
    "A street in St. Louis at night": "A street in St. Louis at night",
    "Mr. Smith walks his dog in the park": "Mr. Smith walks his dog in the park",
    "A U.S. flag waves over a field": "A U.S. flag waves over a field",
    "An old man vs. a young boy playing chess": "An old man vs. a young boy playing chess",
    "A bird, no. 5 in the series, sings": "A bird, no. 5 in the series, sings",
    "John F. Kennedy speaks. The cro": "John F. Kennedy speaks.",
    "At 5 p.m. she waits. Dr. Who com": "At 5 p.m. she waits.",
    "A dog runs. He meets Mr.": "A dog runs.",
    "A dog runs. It lives in the U.S.": "A dog runs. It lives in the U.S.",
    "Apples, pears, etc.": "Apples, pears, etc.",
    "The sign says no. A man": "The sign says no.",
    "It is not Bob's. They don't. He": "It is not Bob's. They don't.",
    "Sure-footed goats climb a cliff. Snow falls on them.": "Sure-footed goats climb a cliff. Snow falls on them.",
    "Certainly, here it is: a cat.": "A cat.",
    "": "",
}


@pytest.mark.parametrize("text", REFINED)
def test_refine(text):
    assert refine(text) == REFINED[text]


def test_captions_of_the_clips_are_clean_already(clips_csv):
    texts = [text for name in ("text", "paraphrase", "blind") for text in read_frame(clips_csv)[name]]
    assert [clean(text) for text in texts] == texts
    assert [refine(text) for text in texts] == texts


def test_scores_in_words():
    assert (
        with_scores("A dog.", 5.5, 10, "pan_left")
        == prompts.with_scores("A dog.", {"aes": 5.5, "flow": 10, "camera_motion": "pan left"})
        == "A dog. aesthetic score: 5.5. motion score: 10.0. camera motion: pan left."
    )
    assert with_scores("A dog.", None, None, "unclassified") == "A dog."
    again = with_scores("A dog.", 5.46, None, "")
    assert again == "A dog. aesthetic score: 5.5."
    assert with_scores(again, 5.46, None, "") == again


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_a_row_without_a_path_has_no_caption_beside_it(tmp_path, do, kind):
    (tmp_path / "in").mkdir()
    for name in ("in", "in/a"):
        (tmp_path / f"{name}.{kind}").write_text('{"text": "beside"}' if kind == "json" else "beside")
    rows = [{"path": "a.mp4", "text": ""}, {"path": "", "text": "own"}]
    for folder in (tmp_path / "in", Path("/")):
        table, lines = do(rows, ("load-caption", kind), folder=folder)
        assert table.text("text")[1] == "own"
        assert "1 rows have no such file" in lines[0] or folder == Path("/")


def test_operations_on_captions(do):
    rows = [
        {"path": "a.mp4", "text": "<b>A dog</b>", "aes": "5", "cmotion": "zoom in"},
        {"path": "b.mp4", "text": "#x", "aes": "", "cmotion": "unclassified"},
    ]
    table, lines = do(rows, ("clean-caption", True), ("append-text", "In the rain."), ("merge-cmotion", True))
    assert table.text("text").tolist() == ["A dog In the rain. camera motion: zoom in.", "In the rain."]
    assert lines == [
        "--clean-caption: 2 -> 2 rows; 2 captions changed, 1 of them became empty",
        "--append-text In the rain.: 2 -> 2 rows; 2 captions changed",
        "--merge-cmotion: 2 -> 2 rows; 1 captions changed; 1 rows without a known camera motion",
    ]
    table, _ = do(rows, ("score-to-text", True))
    assert table.text("text").tolist() == ["<b>A dog</b> aesthetic score: 5.0. camera motion: zoom in.", "#x"]
    with pytest.raises(UserError, match="none of the columns aes, flow and cmotion"):
        do([{"path": "a", "text": "b"}], ("score-to-text", True))


def test_captions_beside_the_files(tmp_path, do):
    (tmp_path / "a.txt").write_text("  first\nline \n")
    (tmp_path / "b.json").write_text('{"caption": "second"}')
    (tmp_path / "c.json").write_text('{"text": "third"}')
    rows = {"path": ["a.mp4", "b.mp4", "c.mp4", "d.mp4"], "text": list("wxyz")}
    table, lines = do(rows, ("load-caption", "txt"), ("load-caption", "json"), folder=tmp_path)
    assert table.text("text").tolist() == ["first\nline", "second", "third", "z"]
    assert "1 captions read; 3 rows have no such file, or none with a caption, and stay as they are" in lines[0]
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(UserError, match=r"d\.json is no valid JSON"):
        do(rows, ("load-caption", "json"), folder=tmp_path)


def test_tokens_are_counted(tmp_path, do):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(
        tmp_path / "t"
    )
    rows = {"path": ["1", "2", "3"], "text": ["a cat sat", "", "a"]}
    table, lines = do(rows, ("count-num-token", str(tmp_path / "t")), ("lenmax", 2.0))
    assert table.text("text_len").tolist() == ["1", "2"]
    assert lines[0].endswith("7 tokens, at most 4")
    with pytest.raises(UserError, match="tokenizer: there is no folder"):
        do(rows, ("count-num-token", "./none"))


def test_languages(do):
    texts = [
        "A dog runs over the green grass in the morning.",
        "Ein Hund läuft am Morgen über das grüne Gras.",
        "雨が降る街を歩く人々",
        "42",
    ]
    table, lines = do({"path": list("abcd"), "text": texts}, ("lang", "en"))
    assert table.text("text").tolist() == texts[:1]
    assert "1 in de; 1 in ja; 1 without letters" in lines[0]
    with pytest.raises(UserError, match="'english' is no language"):
        do({"path": ["a"], "text": ["b"]}, ("lang", "english"))


def test_languages_need_a_package(do, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(UserError, match="pip install py3langid"):
        do({"path": ["a"], "text": ["b"]}, ("lang", "en"))


def test_full_stops_take_linear_time():
    """Each looks at the word before it, not at the whole text."""
    text = "It is 3 p.m. in St. Louis. " * 20_000
    began = time.process_time()
    assert captions._whole_sentences(text + "tail").endswith("Louis.")
    assert time.process_time() - began < 20  # from the text's begin each: minutes
