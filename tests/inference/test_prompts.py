"""Where prompts come from, what is written inside them, and everything that only looks like it."""

import contextlib
import json
import os
import re
import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opensora.config.load import InferenceConfig, config_from_dict
from opensora.inference.jobs import Job, batches
from opensora.inference.prompts import (
    SETTINGS,
    PromptItem,
    Segment,
    check_settings,
    files_of,
    load_items,
    load_prompts,
    split_segments,
    split_settings,
    with_scores,
    without_scores,
)
from opensora.utils.errors import UserError
from opensora.utils.folders import REPOSITORY

CONFIG = config_from_dict(
    InferenceConfig,
    {
        "num_frames": 16,
        "fps": 8,
        "image_size": (32, 32),
        "model": {"type": "STDiT"},
        "vae": {"type": "VideoAutoencoderKL"},
        "text_encoder": {"type": "t5"},
        "scheduler": {"type": "iddpm"},
    },
)


def items(*prompts, **changes):
    return load_items(replace(CONFIG, prompt=list(prompts) or None, **changes))


def test_text_file_skips_blanks_and_comments_and_reads_utf8(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff# two lakes\r\n\r\n  a calm lake \r\n   \n平静的湖 🌅\n#c\na # inside".encode())
    assert load_prompts(None, file) == ["a calm lake", "平静的湖 🌅", "a # inside"]


def test_references_of_the_project_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files_of("assets/clips/white_dog.mp4; assets/clips/mine.mp4") == files_of(
        [str(REPOSITORY / "assets/clips/white_dog.mp4"), "assets/clips/mine.mp4"]
    )


def test_csv_takes_column_text_verbatim(tmp_path):
    file = tmp_path / "prompts.csv"
    file.write_text('path,text\na.mp4,"a cat, ""loud"",\nand wet"\nb.mp4,# None\nc.mp4,NA\nd.mp4,  x \ne.mp4,\n')
    assert load_prompts(None, str(file)) == ['a cat, "loud",\nand wet', "# None", "NA", "  x ", ""]


def test_jsonl_takes_text_verbatim(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"text": "a | [b] {c}"}, {"text": "# None\nx"}, {"text": ""}, {"seed": 3}, {"text": None}]
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert load_prompts(None, file) == ["a | [b] {c}", "# None\nx", "", "", ""]
    file.write_text('{"text": 207}\n{"text": 360}\n')  # classes
    assert load_prompts(None, file) == ["207", "360"]


def test_a_json_list_of_texts_or_objects(tmp_path):
    """The same prompts in a list, and in a table with the other name of the column."""
    file = tmp_path / "prompts.json"
    rows = [{"prompt": "a lake", "seed": 3, "negative_prompt": ""}, {"text": "a | {b}", "prompt": "no"}]
    file.write_text("\ufeff" + json.dumps(["# a\nb", *rows], indent=1), encoding="utf-8")
    first, second, third = load_items(replace(CONFIG, prompt_path=str(file)))
    assert (first.text, second.text, third.text) == ("# a\nb", "a lake", "a | {b}")
    assert (second.overrides, second.negative_prompt, third.negative_prompt) == ({"seed": 3}, "", None)
    for name, text in (
        ("p.jsonl", '{"prompt": "a lake"}\n{"text": "b", "prompt": 1}\n'),
        ("p.csv", "prompt\na lake\nb\n"),
    ):
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        assert load_prompts(None, tmp_path / name) == ["a lake", "b"]


def test_prompt_wins_and_is_verbatim(tmp_path):
    assert load_prompts([" # a", "b"], tmp_path / "missing.txt") == [" # a", "b"]
    assert load_prompts("one", None) == ["one"]


def test_slice(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("a\n# no prompt\nb\nc\nd\n")
    assert load_prompts(None, file, 1, 3) == ["b", "c"]
    assert load_prompts(None, file, None, 99) == ["a", "b", "c", "d"]
    assert load_prompts(["a", "b"], None, 1, None) == ["b"]
    chosen = load_items(replace(CONFIG, prompt_path=str(file), start_index=1, end_index=3))
    assert [(item.index, item.text) for item in chosen] == [(1, "b"), (2, "c")]


def test_every_mistake_is_reported(tmp_path):
    (tmp_path / "empty.txt").write_text("\n# only a comment\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "none.csv").write_text("path,caption\na,b\n")
    (tmp_path / "quote.csv").write_text('text\n"a"b\n')
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    (tmp_path / "more.csv").write_text("text\na, b\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text" "b"}\n')
    (tmp_path / "list.jsonl").write_text('["a"]\n')
    (tmp_path / "kind.jsonl").write_text('{"text": "a"}\n{"text": 1.5}\n')
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "lines.json").write_text('"a"\n"b"\n')
    (tmp_path / "object.json").write_text('{"prompts": ["a"]}')
    (tmp_path / "number.json").write_text('["a", 3]')
    (tmp_path / "twice.json").write_text('[{"text": "a", "seed": 1, "seed": 2}]')
    (tmp_path / "half.json").write_text('["\\ud800"]')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "name.json").write_text('[{"caption": "a"}]')
    (tmp_path / "empty.json").write_text("[]")
    for path, start, end, message in [
        (None, None, None, "--prompt-path"),
        ("missing.txt", None, None, "no such file"),
        ("empty.txt", None, None, "no prompt"),
        ("latin.txt", None, None, "UTF-8"),
        ("none.csv", None, None, "no column 'text'; its columns are path, caption"),
        ("quote.csv", None, None, "no valid CSV.*is a quote left open"),
        ("twice.csv", None, None, "more than one column 'text'"),
        ("more.csv", None, None, "double quotes"),
        ("bad.jsonl", None, None, "line 2: no valid JSON"),
        ("list.jsonl", None, None, "line 1: not an object"),
        ("kind.jsonl", None, None, r"row 2: text=1.5; expected a text"),
        ("lines.json", None, None, r'no valid JSON .*a .json file of prompts is a list: \["a lake", ...\] or'),
        ("object.json", None, None, "a .json file of prompts is a list"),
        ("number.json", None, None, "a .json file of prompts is a list"),
        ("twice.json", None, None, "'seed' is there twice"),
        ("half.json", None, None, "surrogates not allowed"),
        ("deep.json", None, None, "no valid JSON"),
        ("name.json", None, None, "no column 'text'; its columns are caption"),
        ("empty.json", None, None, "there is no prompt in it"),
        ("two.txt", 2, None, "numbered 0 to 1"),
        ("two.txt", 1, 1, "numbered 0 to 1"),
        ("two.txt", -1, None, "counted from 0"),
    ]:
        with pytest.raises(UserError, match=message):
            load_prompts(None, path and tmp_path / path, start, end)
    with pytest.raises(UserError, match="no prompt"):
        load_prompts([], None)


# ------------------------------------------------------------------------------------------------ what belongs to a prompt


def test_a_plain_prompt():
    (item,) = items("a lake")
    assert item == PromptItem(index=0, segments=(Segment(0, "a lake"),))
    assert (item.text, item.text_at(0), item.text_at(7)) == ("a lake", "a lake", "a lake")
    assert item.mask_strategy is item.negative_prompt is None


def test_settings_at_the_end_of_a_prompt():
    settings = {
        "reference_path": "a.png; b.mp4",
        "mask_strategy": "0;0,1,0,-1",
        "negative_prompt": "blurry",
        "seed": 7,
        "cfg_scale": 3,
        "aes": 6,
    }
    (item,) = items("a lake " + json.dumps(settings))
    assert item.text == "a lake aesthetic score: 6.0."
    assert item.references == ("a.png", "b.mp4")
    assert item.mask_strategy == "0;0,1,0,-1"
    assert item.negative_prompt == "blurry"
    assert item.overrides == {"seed": 7, "cfg_scale": 3.0}


def test_columns_of_a_table_are_the_same_settings(tmp_path, caplog):
    csv = tmp_path / "p.csv"
    csv.write_text(
        "text,reference_path,mask_strategy,seed,cfg_scale,aes,flow,camera_motion,negative_prompt,path,mask_stategy\n"
        'lake,a.png;b.png,"0;0,1,0,-1",3,2.5,6.5,,pan left,blurry,x,y\n'
        "sea,,,,,,,,,x,y\n"
    )
    jsonl = tmp_path / "p.jsonl"
    row = {
        "text": "lake",
        "reference_path": ["a.png", "b.png"],
        "mask_strategy": "0;0,1,0,-1",
        "seed": 3,
        "cfg_scale": 2.5,
        "aes": 6.5,
        "camera_motion": "pan left",
        "negative_prompt": "blurry",
    }
    jsonl.write_text("\n".join(map(json.dumps, [row, {"text": "sea"}])))
    lake, sea = load_items(replace(CONFIG, prompt_path=str(csv)))
    assert [lake, sea] == load_items(replace(CONFIG, prompt_path=str(jsonl)))
    assert lake.text == "lake aesthetic score: 6.5. camera motion: pan left."
    assert lake.references == ("a.png", "b.png")
    assert lake.overrides == {"seed": 3, "cfg_scale": 2.5}
    assert sea == PromptItem(index=1, segments=(Segment(0, "sea"),))
    assert "column 'mask_stategy' is not used. Did you mean 'mask_strategy'?" in caplog.text


def test_what_the_config_says_and_who_wins():
    given = {"reference_path": ["a.png", ""], "mask_strategy": ["0", ""], "aes": 6.5, "negative_prompt": ["blurry"]}
    first, second = items("a lake", 'a sea{"aes": "excellent", "negative_prompt": "dark"}', **given)
    assert (first.text, first.references, first.mask_strategy) == ("a lake aesthetic score: 6.5.", ("a.png",), "0")
    assert (second.text, second.references, second.mask_strategy) == ("a sea aesthetic score: excellent.", (), None)
    assert (first.negative_prompt, second.negative_prompt) == ("blurry", "dark")
    (item,) = items('a lake{"reference_path": "b.png"}', reference_path=["a.png"], mask_strategy=["0"])
    assert (item.references, item.mask_strategy) == (("b.png",), "0")
    each = items("a", "b", negative_prompt=["x", ""])
    assert [item.negative_prompt for item in each] == ["x", None]


def test_an_empty_negative_prompt_is_a_text(tmp_path):
    """The encoder's own "no text", as diffusers' PixArt needs it; only an empty cell of a CSV and a field left out are none."""
    for prompts in (["a"], ["a", "b"]):
        assert {item.negative_prompt for item in items(*prompts, negative_prompt=[""])} == {""}
    assert [item.negative_prompt for item in items("a", "b", negative_prompt=["", ""])] == ["", ""]
    inline = items('a{"negative_prompt": ""}', 'b{"negative_prompt": null}', "c", negative_prompt=["x"])
    assert [item.negative_prompt for item in inline] == ["", "x", "x"]
    csv, jsonl = tmp_path / "p.csv", tmp_path / "p.jsonl"
    csv.write_text('text,negative_prompt\na,\nb,""\nc,x\n"d{""negative_prompt"": """"}",\n')
    rows = [{"text": "a"}, {"text": "b", "negative_prompt": None}, {"text": "c", "negative_prompt": ""}]
    jsonl.write_text("\n\n".join(map(json.dumps, [*rows, {"text": "d", "negative_prompt": "x"}])))
    read = [[item.negative_prompt for item in load_items(replace(CONFIG, prompt_path=str(p)))] for p in (csv, jsonl)]
    assert read == [[None, None, "x", ""], [None, None, "", "x"]]


def test_segments_of_a_long_video():
    (item,) = items("|0|a calm lake|2|a storm, 100% real|5|the lake [again]", loop=6, flow=2)
    assert [item.text_at(k) for k in range(6)] == [
        *["a calm lake motion score: 2.0."] * 2,
        *["a storm, 100% real motion score: 2.0."] * 3,
        "the lake [again] motion score: 2.0.",
    ]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (
            "|0|a|3|b",
            {"loop": 3},
            r"prompt 0: segment \|3\| has no effect, for loop=3 makes loops 0 to 2; set --loop 4",
        ),
        ("|0|a|1|b", {}, "set --loop 2"),
        ('a{"reference_path": "x.png", "mask_strategy": "1"}', {}, "mask_strategy='1' has no effect.*set --loop 2"),
        ('a{"mask_strategy": "0"}', {}, "mask_strategy='0' has no effect without reference_path"),
        ('a{"reference_path": "x.png", "mask_strategy": "0,0,0,0,z"}', {}, "prompt 0: mask_strategy=.* length='z'"),
        ('a{"reference_path": "x.png"}', {}, "prompt 0: mask_strategy: reference 0 has no effect"),
        ('a{"reference_path": "x", "mask_strategy": "0;0,1"}', {}, "mask_strategy: reference=1 does not exist"),
        ("a", {"reference_path": ["x", "y"]}, "reference_path has 2 entries for 1 prompts"),
        ("a", {"mask_strategy": ["0", "0"]}, "mask_strategy has 2 entries for 1 prompts"),
        ("a", {"negative_prompt": ["x", "y"]}, "negative_prompt has 2 entries for 1 prompts"),
        ("a", {"aes": float("nan")}, "config: aes=nan; expected a number or a word"),
    ],
)
def test_what_would_have_no_effect_is_refused(prompt, changes, message):
    with pytest.raises(UserError, match=message):
        items(prompt, **changes)


def test_the_five_field_order_is_asked_for():
    prompt = 'a{"reference_path": "x.png;y.png", "mask_strategy": "1,0;0"}'
    with pytest.raises(UserError, match="set --loop 2"):
        items(prompt)
    assert items(prompt, mask_strategy_format="five-fields")[0].mask_strategy == "1,0;0"


def test_all_bad_prompts_are_reported_at_once(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("ok\n" + 'x{"seed": "y"}\n' * 7)
    with pytest.raises(UserError) as caught:
        load_items(replace(CONFIG, prompt_path=str(file)))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{file}, line 2: seed='y'; expected a whole number."
    assert len(lines) == 6
    assert lines[-1] == "and 2 more"


def test_a_setting_in_a_cell_and_in_the_text(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"text": 'x{"seed": 1}', "seed": 2}))
    with pytest.raises(UserError, match="row 1: seed is set in the table and at the end of the text"):
        load_items(replace(CONFIG, prompt_path=str(file)))


def test_prompts_with_a_guidance_of_their_own_share_no_batch_with_others(tmp_path):
    """A request has one guidance scale, which is that of its first prompt."""
    scales = (None, 3.0, None, 3.0)
    made = [
        Job(
            PromptItem(
                index=i, segments=(Segment(0, "a cat"),), overrides={} if scale is None else {"cfg_scale": scale}
            ),
            k,
            tmp_path,
        )
        for k in range(2)
        for i, scale in enumerate(scales)
    ]
    numbers = [[(job.sample_index, job.item.index) for job in batch] for batch in batches(made, batch_size=8)]
    assert numbers == [[(k, i), (k, i + 2)] for k in range(2) for i in range(2)]


# all of it is text
TEXT = [
    "",
    " ",
    "a calm lake",
    "a [red] car",
    "[", "]", "{", "}", "{}", "[]", "|", "||", "a | b", "a || b |", '"', "\\", "a{", "a}", "{a}", "}{",
    "a {curly} text",
    'a sign that says {"hello": "world"}',
    'a json file {"name": [1, 2, {"x": null}]}',
    "{'python': 'dict'}",
    '{"unfinished": ',
    'f(x) = {"a": 1} + x',
    "100% | of [all] {prompts} \\ / : * ? < >",
    "平静的湖 {🌅}",
    "line\nbreak {\n}",
    "reference_path mask_strategy",
    "a{b}{c}[d]",
    "|a|",
    "1|0|a",
    "a |0| b",
    "{" * 3000,
    '{"' * 3000,
]  # fmt: skip
SETTINGS_AT_THE_END = [
    ('a{"reference_path": "x.png"}', "a", {"reference_path": ("x.png",)}),
    ('a {"reference_path": "x.png"} ', "a", {"reference_path": ("x.png",)}),
    ('{"reference_path": "x.png"}', "", {"reference_path": ("x.png",)}),
    ('a{ "mask_strategy" : "0" }', "a", {"mask_strategy": "0"}),
    ('a{"mask_strategy": 0}', "a", {"mask_strategy": "0"}),
    ('a{"reference_path": ["x;y.png", "b.png"]}', "a", {"reference_path": ("x;y.png", "b.png")}),
    ('a{"reference_path": "x.png; http://h/b.png;"}', "a", {"reference_path": ("x.png", "http://h/b.png")}),
    ('a [b] {c} | d{"seed": 3}', "a [b] {c} | d", {"seed": 3}),
    ('a {"hello": "world"} b {"seed": -3}', 'a {"hello": "world"} b', {"seed": -3}),
    ('a{"seed": "12"}', "a", {"seed": 12}),
    ('a{"cfg_scale": 7}', "a", {"cfg_scale": 7.0}),
    (
        'a{"aes": 6, "flow": "high", "camera_motion": "pan left"}',
        "a",
        {"aes": 6.0, "flow": "high", "camera_motion": "pan left"},
    ),
    ('a{"seed": null, "mask_strategy": ""}', "a", {}),
    ('a{"negative_prompt": "", "camera_motion": " "}', "a", {"negative_prompt": ""}),
    ('a\n{\n"seed": 1\n}\n', "a", {"seed": 1}),
    ('a{"negative_prompt": "{b} [c] \\"d\\""}', "a", {"negative_prompt": '{b} [c] "d"'}),
]
BROKEN = [
    ('a{"reference_path": "x.png"', "the settings at its end are no valid JSON"),
    ('a{"reference_path": x.png}', "no valid JSON"),
    ("a{'reference_path': 'x.png'}", "no valid JSON"),
    ('a {"seed": 3} b{"seed": {}', "no valid JSON"),
    ('a{"reference_path": "x.png', "no valid JSON"),
    ('a{"seed": 3}}', "no valid JSON.*Where they are text, let more text follow"),
    ('a{"reference_path": "x.png"}{"seed": 1}', "no valid JSON"),
    ('a{"refrence_path": "x.png"}', "'refrence_path' is no setting. Did you mean 'reference_path'"),
    ('a{"mask_stratgy": "0"}', "'mask_stratgy' is no setting. Did you mean 'mask_strategy'"),
    ('a{"seed": 1, "steps": 2}', "'steps' is no setting.*Settings: reference_path, mask_strategy"),
    ('a{"other": 1, "seed": 2}', "'other' is no setting"),
    ('a{"seed": 1, "seed": 2}', "no valid JSON .*'seed' is there twice"),
    ('a{"seed": 1.5}', "seed=1.5; expected a whole number"),
    ('a{"seed": true}', "seed=True; expected a whole number"),
    ('a{"seed": "x"}', "seed='x'; expected a whole number"),
    ('a{"seed": [1]}', r"seed=\[1\]; expected a whole number"),
    ('a{"cfg_scale": "high"}', "cfg_scale='high'; expected a number"),
    ('a{"cfg_scale": NaN}', "cfg_scale=nan; expected a number"),
    ('a{"cfg_scale": 1e999}', "cfg_scale=inf; expected a number"),
    ('a{"aes": Infinity}', "aes=inf; expected a number or a word"),
    ('a{"aes": {}}', "aes={}; expected a number or a word"),
    ('a{"reference_path": 3}', "reference_path=3; expected files or URLs"),
    ('a{"reference_path": ["x", 3]}', r"reference_path=\['x', 3\]; expected"),
    ('a{"mask_strategy": ["0"]}', "mask_strategy=.*; expected a string"),
    ('a{"negative_prompt": 3}', "negative_prompt=3; expected a text"),
    ('a{"camera_motion": 3}', "camera_motion=3; expected words"),
    ('a{"seed": ' + "[" * 5000, "no valid JSON"),
]
SEGMENTS = [
    ("|0|a", [(0, "a")]),
    ("|0|a|1|b", [(0, "a"), (1, "b")]),
    (" |0| a |3| b c |10| d ", [(0, "a"), (3, "b c"), (10, "d")]),
    ("|0|a | b || c|2|d", [(0, "a | b || c"), (2, "d")]),
    ("|0|x {y} [z]", [(0, "x {y} [z]")]),
    ("|00|a|01|b", [(0, "a"), (1, "b")]),
]
BAD_SEGMENTS = [
    ("|1|a", r"its segments begin with \|1\|; the first is \|0\|"),
    ("|0|a|2|b|1|c", r"numbered \[0, 2, 1\]; numbers ascend"),
    ("|0|a|0|b", r"numbered \[0, 0\]"),
    ("|0|", r"segment \|0\| has no text"),
    ("|0|a|1| |2|b", r"segment \|1\| has no text"),
]


@pytest.mark.parametrize("text", TEXT)
def test_any_character_may_be_in_a_prompt(text):
    assert split_settings(text, "p") == (text, {})
    assert split_segments(text, "p") == ((0, text),)
    assert with_scores(text, {}) == text


@pytest.mark.parametrize("braces", ['{"reference_path": "x.png"}', '{"refrence_path": "x.png"}', "{'seed': red}"])
def test_settings_before_other_text_are_text_with_a_warning(braces, caplog):
    prompt = f"a screen that shows {braces} in green"
    assert split_settings(prompt, "prompt 4") == (prompt, {})
    assert caplog.text.count(f"prompt 4: {braces} is text; settings stand at the end") == 1
    assert split_settings(prompt + '{"seed": 3}', "prompt 4") == (prompt, {"seed": 3})
    nested = 'a {"seed": {"aes": 1}} in {"seed": 1} colours'
    assert split_settings(nested, "prompt 5") == (nested, {})
    assert caplog.text.count("prompt 5") == 1


@pytest.mark.parametrize(
    "part",
    ['{"a":', '{"seed":', '{"seed": 1}', '{"seed": 1} ', "{'seed': 1} x", '{"', "{ ", '"a": ', " "],
)
def test_time_grows_with_the_length_of_a_prompt(part):
    """100 kB in hundredths of a second; trying each brace on the rest of the text takes minutes."""
    text = part * (100_000 // len(part))
    begin = time.process_time()
    with contextlib.suppress(UserError):
        split_segments(f"|0|{text}", "p")
    for prompt in (text, f"{text}}}", text + "x", f'{{"{text}": 1}}'):
        with contextlib.suppress(UserError):
            split_settings(prompt, "p")
    assert time.process_time() - begin < 4


@pytest.mark.parametrize(
    "part", [" ", "motion score: 1. ", "camera motion: ", "camera motion: a. ", "aesthetic score: 11"]
)
def test_time_grows_with_the_length_of_scores(part):
    begin = time.process_time()
    assert without_scores(part * (100_000 // len(part)) + "x").endswith("x")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a lake motion score: 5.0. camera motion: pan left. ", "a lake"),
        ("  aesthetic score: 6.5.", ""),
        ("a lake motion score: 5. at dawn camera motion: tilt.", "a lake motion score: 5. at dawn"),
        ("a lake.motion score: 5.aesthetic score: 6.", "a lake."),
        ("emotion score: 5. motion score: 5.", "emotion score: 5."),
        ("a lake motion score: high.", "a lake motion score: high."),
        ("a lake", "a lake"),
        ("", ""),
    ],
)
def test_scores_at_the_end_are_removed(text, expected):
    assert without_scores(text) == expected


@pytest.mark.parametrize(("prompt", "text", "settings"), SETTINGS_AT_THE_END)
def test_settings_at_the_end(prompt, text, settings):
    assert split_settings(prompt, "p") == (text, settings)


@pytest.mark.parametrize(("prompt", "message"), BROKEN)
def test_settings_that_are_broken_are_reported(prompt, message):
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)) as caught:
        split_settings(prompt, "prompt 4")
    assert str(caught.value).startswith("prompt 4: ")


@pytest.mark.parametrize(("text", "segments"), SEGMENTS)
def test_segments(text, segments):
    assert list(split_segments(text, "p")) == segments


@pytest.mark.parametrize(("text", "message"), BAD_SEGMENTS)
def test_segments_that_are_none(text, message):
    with pytest.raises(UserError, match=f"^prompt 4: .*{message}"):
        split_segments(text, "prompt 4")


@pytest.mark.parametrize(
    ("text", "scores", "expected"),
    [
        ("a lake", {"aes": 6.5}, "a lake aesthetic score: 6.5."),
        ("a lake", {"aes": 7, "flow": 5, "camera_motion": "pan left"},
         "a lake aesthetic score: 7.0. motion score: 5.0. camera motion: pan left."),
        ("a lake", {"aes": "excellent", "flow": None}, "a lake aesthetic score: excellent."),
        ("a lake aesthetic score: 5.5.", {"aes": 6.5, "flow": 2}, "a lake aesthetic score: 5.5. motion score: 2.0."),
        ("a lake, Motion Score: 3", {"flow": 5}, "a lake, Motion Score: 3"),
        ("", {"aes": 6.5}, "aesthetic score: 6.5."),
        ("a lake", {"aes": 0}, "a lake aesthetic score: 0.0."),
    ],
)  # fmt: skip
def test_scores_as_captions_were_written_in_training(text, scores, expected):
    assert with_scores(text, scores) == expected
    assert with_scores(expected, scores) == expected


def test_files():
    assert files_of("a.png") == ("a.png",)
    assert files_of(" a b.png ;; http://h/x?q=1 ") == ("a b.png", "http://h/x?q=1")
    assert files_of(["a;b.png"]) == ("a;b.png",)
    assert files_of(3) is files_of([""]) is files_of([3]) is None


@pytest.mark.slow
@given(st.text() | st.text("ab{}[]|\"':, 0129.-_\n", max_size=60))
@example('{"":0}')
@example('a{"reference_path":"\ud800"}')
@example('{"aes":[[[[')
def test_any_prompt_is_text_or_refused_by_name(prompt):
    try:
        text, settings = split_settings(prompt, "prompt 0")
        segments = split_segments(text, "prompt 0")
    except UserError as error:
        assert str(error).startswith("prompt 0: ")  # noqa: PT017  (some inputs are right)
    else:
        assert prompt.startswith(text)
        assert settings.keys() <= SETTINGS.keys()
        assert segments[0].loop == 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
)


@pytest.mark.slow
@given(
    st.text(st.characters(exclude_characters="{|"), max_size=20),
    st.dictionaries(st.sampled_from([*SETTINGS]), values, min_size=1),
)
def test_any_value_of_a_setting_is_taken_or_refused_by_name(text, settings):
    prompt = text + json.dumps(settings)
    try:
        found, checked = split_settings(prompt, "prompt 0")
    except UserError as error:
        assert any(f"prompt 0: {name}=" in str(error) for name in settings)  # noqa: PT017  (some inputs are right)
    else:
        assert found == text.rstrip()
        assert checked == check_settings(json.loads(json.dumps(settings)), "x")
        assert checked.keys() <= settings.keys()


@pytest.mark.parametrize("field", ["prompt", "negative_prompt", "reference_path"])
def test_what_is_no_unicode_is_refused_before_sampling(field):
    """A byte of another encoding on the command line; a name or a sidecar could not be written."""
    changes = {"negative_prompt": ["blur"], "reference_path": ["a.png"]} | {field: ["caf\udce9"]}
    prompt = changes.pop("prompt", ["a lake"])
    with pytest.raises(UserError, match=r"prompt 0: 'caf\\udce9' is no Unicode text: '\\udce9' .* LANG=C.UTF-8"):
        items(*prompt, **changes)


def test_a_prompt_file_that_is_a_pipe_is_not_called_missing(tmp_path):
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(UserError, match=r"p\.txt: there is no such regular file"):
        load_prompts(None, tmp_path / "p.txt")
