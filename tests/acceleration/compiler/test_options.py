"""Mode strings and options: every word and documented combination, in any order, and what excludes each other."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from opensora.acceleration.compile.nexfort import COMBINATIONS, MODES, Options, _arguments
from opensora.acceleration.compile.quantise import TYPES
from opensora.acceleration.compiler import parse_options
from opensora.utils.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "compiler.md"

DOCUMENTED = [
    "O2",
    "O3",
    "max-autotune",
    "max-optimize:max-autotune:low-precision",
    "max-optimize:max-autotune:low-precision:cache-all",
    "max-optimize:max-autotune:low-precision:cache-all:cudagraphs:freezing",
    "jit:disable-runtime-fusion",
    "quant:max-optimize:max-autotune:freezing:benchmark:low-precision",
]


@pytest.mark.parametrize("mode", DOCUMENTED)
def test_documented_modes_in_any_order(mode):
    words = mode.split(":")
    assert Options(mode=mode).describe() == Options(mode=":".join(reversed(words))).describe()
    settings = [
        parse_options({"mode": ":".join(order)}).inductor_settings() for order in (words, list(reversed(words)))
    ]
    assert settings[0] == settings[1]


def test_a_memory_format_may_be_pytorchs_own():
    for own in (torch.channels_last, torch.contiguous_format):
        assert parse_options({"memory_format": own}).memory_format == str(own).removeprefix("torch.")
    assert parse_options({"memory_format": torch.preserve_format}).memory_format is None


def test_inductor_knows_every_setting():
    from torch._inductor import config

    # PyTorch 2.6 has no prologue_fusion
    settings = {setting for word in MODES.values() for setting in word}
    assert settings <= config.get_config_copy().keys() | {"prologue_fusion"}


@pytest.mark.parametrize("word", MODES)
def test_a_word_reaches_the_compiler_and_its_row_in_the_docs_says_what_it_sets(word):
    from torch._inductor import config

    given = _arguments("inductor", parse_options({"mode": word}))["options"]
    assert given == given | {name: value for name, value in MODES[word].items() if name in config.get_config_copy()}
    assert not _arguments("inductor", parse_options(None))["options"].keys() & MODES[word].keys()
    assert MODES[word].keys() <= set(re.findall(r"`([\w.]+)`", row_of(word)))


def test_the_docs_list_every_word_option_and_type():
    for name in (*MODES, *COMBINATIONS, *(one.name for one in fields(Options) if one.name != "overrides")):
        assert row_of(name)
    page = PAGE.read_text()
    assert all(f"`{kind}`" in page for kind in TYPES)
    modes = page.partition("## Modes")[2].partition("| combination")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", modes, re.MULTILINE)) == {*MODES, *COMBINATIONS}


def row_of(name: str) -> str:
    """Of a table of the page, by its first cell."""
    rows = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ") and f"`{name}`" in line.split(" | ")[0]
    ]
    assert len(rows) >= 1, f"docs/how-to/compiler.md has no row for {name}"
    return rows[0]


def test_the_combinations_differ_in_precision():
    almost_all = Options(mode="max-optimize:max-autotune:low-precision:cache-all").words
    assert Options(mode="O2").words == Options(mode="O3").words == almost_all
    assert (Options(mode="O2").reduced_precision, Options(mode="O3").reduced_precision) == (False, True)
    with pytest.raises(UserError, match="O2 and O3 differ in precision"):
        parse_options({"mode": "O2:O3"})


def test_an_unknown_word_lists_the_known_ones():
    with pytest.raises(UserError, match=r"no word 'max-autotun'. Did you mean 'max-autotune'\?.*cache-all.*O3"):
        parse_options({"mode": "O2:max-autotun"})


def test_json_is_a_dict_and_neither_is_changed():
    given = {
        "mode": "O3",
        "dynamic": True,
        "options": {"inductor.epilogue_fusion": False},
        "triton.unique_kernel_names": True,
    }
    before = json.dumps(given)
    options = parse_options(given)
    assert options == parse_options(before)
    assert json.dumps(given) == before
    assert options.inductor_settings() == MODES["cache-all"] | MODES["max-autotune"] | MODES["max-optimize"] | {
        "epilogue_fusion": False,
        "triton.unique_kernel_names": True,
    }
    assert parse_options(None) == parse_options("") == parse_options({})


def test_settings_with_a_dot_that_mean_nothing_are_reported():
    with pytest.warns(UserWarning, match="inductor.optimize_linear_epilogue is not a setting"):
        options = parse_options({"inductor.optimize_linear_epilogue": False})
    assert options.inductor_settings() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{mode: O3}", "expected a dict or JSON"),
        ("[1]", "expected a dict or JSON"),
        ({"mod": "O3"}, "no key 'mod'. Did you mean 'mode'?"),
        ({"dynamic": "yes"}, "dynamic='yes'"),
        ({"memory_format": "nhwc"}, "memory_format='nhwc', but it takes 'channels_last' or 'contiguous_format'"),
        ({"mode": "cudagraphs", "dynamic": True}, 'use "dynamic": "buckets"'),
        ({"mode": "cudagraphs", "regional": True}, "is of the whole module"),
        ({"mode": "cudagraphs:jit"}, "is of the whole module"),
        ({"mode": "O3", "quant_type": "int8_dynamic"}, 'no effect without "quant"'),
        ({"mode": "O3", "quant_skip": ["blocks.0"]}, 'no effect without "quant"'),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_options(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": 3}, "mode=3, but it takes str."),
        ({"dynamic": 1}, "dynamic=1, but it takes bool or 'buckets' or None."),
        ({"regional": "false"}, "regional='false', but it takes bool or None."),
        ({"mode": "quant", "quant_skip": "blocks"}, "quant_skip='blocks', but it takes list of str."),
        ({"options": "x"}, "expected a dict or JSON such as"),
        ({"inductor.max_autotune": "yes"}, "inductor.max_autotune='yes', but it takes bool."),
        ({"options": {"inductor.coordinate_descent_tuning": 1}}, "inductor.coordinate_descent_tuning=1, but it takes bool."),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_reported(options, message):
    with pytest.raises(UserError, match=re.escape(f"compiler options: {message}")):
        parse_options(options)


def test_values_of_other_types_are_reported_together():
    with pytest.raises(UserError, match=r"mode=3, .*\n.*fullgraph='no', but"):
        parse_options({"mode": 3, "fullgraph": "no"})


def test_settings_have_the_types_that_inductor_takes():
    seconds = "max_autotune_subproc_result_timeout_seconds"
    options = parse_options({"mode": None, "options": None, f"inductor.{seconds}": 20, "triton.multi_kernel": 1})
    assert options.mode == ""
    assert isinstance(options.overrides[f"inductor.{seconds}"], float)
    assert options.overrides["triton.multi_kernel"] == 1
    _arguments("inductor", options)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("inductor.freezing", "freezing"),
        ("triton.cudagraphs", "cudagraphs"),
        ("inductor.triton.cudagraphs", "cudagraphs"),
    ],
)
def test_a_setting_that_a_word_sets_is_no_way_round_its_rules(name, word, value):
    for given in ({name: value}, {"options": {name: value}}, {"options": {name.removeprefix("inductor."): value}}):
        with pytest.raises(UserError, match=f"is more than a setting: put {word} into mode"):
            parse_options(given)


def test_graphs_in_buckets_are_allowed():
    assert parse_options({"mode": "cudagraphs", "dynamic": "buckets"}).dynamic == "buckets"


def test_nexforts_environment(monkeypatch):
    assert _arguments("inductor", parse_options(None))["options"] == {}
    for value, on in (("1", True), ("0", False)):
        monkeypatch.setenv("NEXFORT_GRAPH_CACHE", value)
        assert _arguments("inductor", parse_options(None))["options"] == {"fx_graph_cache": on}
