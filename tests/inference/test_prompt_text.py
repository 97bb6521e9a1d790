"""What is written inside a prompt, and everything that only looks like it."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opensora.inference.prompts import (
    SETTINGS,
    check_settings,
    files_of,
    split_segments,
    split_settings,
    with_scores,
)
from opensora.utils.errors import UserError

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
    ('a{"reference_path": "x.png"} and more', "no valid JSON"),
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


@pytest.mark.parametrize(("prompt", "text", "settings"), SETTINGS_AT_THE_END)
def test_settings_at_the_end(prompt, text, settings):
    assert split_settings(prompt, "p") == (text, settings)


@pytest.mark.parametrize(("prompt", "message"), BROKEN)
def test_settings_that_are_broken_are_told(prompt, message):
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
def test_any_prompt_is_text_or_refused_with_its_place(prompt):
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
