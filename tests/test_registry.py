"""Names that are found, and the message for those that are not."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from opensora.registry import (
    MODELS,
    REGISTRIES,
    PartError,
    Registry,
    build_module,
    describe_registered,
    did_you_mean,
    list_registered,
    main,
)


@pytest.fixture
def registry():
    registry = Registry("part")

    @registry.register_module(name="Part")
    class Part:
        """A part of something.

        Args:
            depth: how deep.
        """

        def __init__(self, depth=28, width=4, channels=None):
            self.depth, self.width, self.channels = depth, width, channels

    registry.register_variant("Part-S", Part, depth=2)
    return registry


def test_build_passes_the_arguments_of_the_config(registry):
    part = registry.build({"type": "Part", "depth": 3})
    assert (part.depth, part.width) == (3, 4)


def test_build_leaves_the_config_as_it_is(registry):
    cfg = {"type": "Part", "depth": 3}
    registry.build(cfg, channels=8)
    assert cfg == {"type": "Part", "depth": 3}


def test_runtime_arguments_reach_only_constructors_that_take_them(registry):
    assert registry.build({"type": "Part"}, channels=8, something_else=1).channels == 8


def test_config_and_runtime_must_agree(registry):
    assert registry.build({"type": "Part", "channels": 8}, channels=8).channels == 8
    with pytest.raises(ValueError, match="the config sets channels=4, but the other components need 8"):
        registry.build({"type": "Part", "channels": 4}, channels=8)


def test_build_module_takes_the_config_first(registry):
    assert build_module({"type": "Part"}, registry, channels=8).channels == 8


def test_a_miss_lists_the_choices_and_the_nearest(registry):
    with pytest.raises(
        ValueError, match=r"'Prat' is not a registered part. Did you mean 'Part'\? Choices: Part, Part-S"
    ):
        registry.build({"type": "Prat"})


def test_an_unknown_argument_is_told_with_the_nearest(registry):
    with pytest.raises(ValueError, match=r"takes no argument 'depht'. Did you mean 'depth'\? It takes: depth, width"):
        registry.build({"type": "Part", "depht": 3})


@pytest.mark.parametrize("cfg", [{}, {"depth": 3}, None, "Part"])
def test_what_is_no_component_is_refused(registry, cfg):
    with pytest.raises(ValueError, match=r"expected dict\(type=NAME"):
        registry.build(cfg)


def test_all_problems_of_a_component_are_told(registry):
    assert len(registry.problems({"type": "Part", "depht": 1, "widht": 2})) == 2
    assert registry.problems({"type": "Part", "depth": 1}) == []


def test_a_name_is_registered_once(registry):
    with pytest.raises(KeyError, match="already registered"):
        registry.register_module(name="Part", module=object)


def test_a_variant_has_other_defaults_that_a_config_may_override(registry):
    assert registry.build({"type": "Part-S"}).depth == 2
    assert registry.build({"type": "Part-S", "depth": 5, "width": 6}).depth == 5
    signature = inspect.signature(registry.get("Part-S"))
    assert signature.parameters["depth"].default == 2
    assert signature.parameters["width"].default == 4


def test_a_variant_is_checked_like_any_constructor(registry):
    with pytest.raises(ValueError, match="takes no argument 'depht'"):
        registry.build({"type": "Part-S", "depht": 5})
    with pytest.raises(TypeError, match="takes no"):
        registry.register_variant("Part-X", registry.get("Part"), height=3)


def test_did_you_mean():
    assert did_you_mean("depht", ["depth", "width"]) == " Did you mean 'depth'?"
    assert did_you_mean("zzz", ["depth", "width"]) == ""


def test_the_list_has_every_name_its_first_line_and_a_variants_defaults(registry):
    assert list_registered([registry]).splitlines() == [
        "part (2)",
        "  Part    A part of something.",
        "  Part-S  A part of something. [depth=2]",
    ]


def test_a_name_is_described_with_its_defaults_and_documentation(registry):
    text = describe_registered("Part-S", registry)
    assert text.startswith("Part-S: part, ")
    assert "\n  depth=2\n  width=4\n  channels=None\n" in text
    assert text.endswith("depth: how deep.")


def test_everything_registered_says_what_it_is():
    assert "no description" not in list_registered(list(REGISTRIES.values()))


def test_the_command_line(capsys):
    main([])
    everything = capsys.readouterr().out
    main(["--registry", "scheduler"])
    schedulers = capsys.readouterr().out
    assert schedulers in everything
    assert "STDiT-XL/2" not in schedulers
    main(["STDiT-XS/2"])
    described = capsys.readouterr().out
    assert "  hidden_size: int = 192\n" in described
    assert "Open-Sora 1.0" in described  # its module's text


@pytest.mark.parametrize("argv", [["STDiT-XL/3"], ["STDiT-XL/2", "--registry", "scheduler"], ["--registry", "modle"]])
def test_an_unknown_name_ends_with_code_2(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    if argv == ["STDiT-XL/3"]:
        assert "'STDiT-XL/3' is not registered. Did you mean 'STDiT-XL/2'?" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_as_a_program_it_lists_the_package_tables_not_its_own():
    command = [sys.executable, "-m", "opensora.registry", "--registry", "model"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert "  STDiT-XL/2 " in done.stdout
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", ["os.system", "os", "torch", "opensora.training.run.due", "__main__.main"])
def test_a_name_is_never_looked_up_as_a_python_object(registry, name):
    """A checkpoint's config is data: its types must not reach what nobody registered."""
    assert registry.get(name) is None
    with pytest.raises(PartError, match="is not a registered part"):
        registry.build({"type": name})
    assert MODELS.get("opensora.STDiT-XL/2") is MODELS.get("STDiT-XL/2") is not None
