"""Parts of the user's own, named in a config's `imports`."""

import sys

import pytest

from opensora.config.load import InferenceConfig, config_from_dict, parse_config, to_dict
from opensora.inference.build import COMPONENTS
from opensora.registry import MODELS
from opensora.utils.errors import UserError

PART = """
from opensora.models.denoiser import Denoiser
from opensora.registry import MODELS
import neighbour

@MODELS.register_module("{name}")
class Part(Denoiser):
    def __init__(self, depth=neighbour.DEPTH, in_channels=4):
        pass

    def forward(self, x, timestep, y, **cond):
        pass
"""
CONFIG = """
num_frames, fps, image_size = 1, 8, (32, 32)
model = dict(type="{name}", depth=4)
vae = dict(type="VideoAutoencoderKL", from_pretrained="vae")
text_encoder = dict(type="hf", from_pretrained="text")
scheduler = dict(type="iddpm")
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into an empty working directory; what is imported from there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    modules, path = set(sys.modules), list(sys.path)
    (tmp_path / "neighbour.py").write_text("DEPTH = 2\n")
    yield lambda name, text: (tmp_path / name).write_text(text)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path
    for name in [name for name in MODELS.module_dict if name.startswith("own-")]:
        del MODELS.module_dict[name]


def read(*argv):
    return parse_config(InferenceConfig, COMPONENTS, ["config.py", *argv])


def test_a_file_named_in_the_config_registers_its_part(write):
    write("parts ü.py", PART.format(name="own-1"))
    write("config.py", CONFIG.format(name="own-1") + 'imports = ["parts ü.py"]\n')
    cfg = read("--model.depth", "8")
    assert cfg.model == {"type": "own-1", "depth": 8}
    assert cfg.imports == ["parts ü.py"]
    assert read("--model.depth", "8") == cfg  # it is imported once: a second time its name would be taken
    assert config_from_dict(InferenceConfig, to_dict(cfg), COMPONENTS) == cfg
    with pytest.raises(UserError, match=r"'own-1' takes no argument 'dept'. Did you mean 'depth'"):
        read("--model.dept", "8")
    assert MODELS.build(cfg.model).__class__.__name__ == "Part"


def test_the_command_line_names_a_module(write, tmp_path, monkeypatch):
    write("my_module.py", PART.format(name="own-2"))
    write("config.py", CONFIG.format(name="own-2"))
    with pytest.raises(UserError, match=r"there is no module 'my_module'.*PYTHONPATH"):
        read("--imports", "my_module")
    monkeypatch.syspath_prepend(tmp_path)
    assert read("--imports", "my_module").model["type"] == "own-2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = x.z\n", r"broken.py:2: AttributeError: 'int' object has no attribute 'z'"),
        ("def f(:\n", r"broken.py:1: .*def f\(:"),
        ("import no_such_package\n", r"broken.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        (
            'from opensora.registry import MODELS\nMODELS.register_module("STDiT-XL/2", module=dict)\n',
            r"broken.py:2: KeyError: STDiT-XL/2 is already registered in model",
        ),
    ],
    ids=["raises", "syntax", "imports what is not there", "takes a name of ours"],
)
def test_what_goes_wrong_is_told_with_its_line(write, text, message):
    write("broken.py", text)
    write("config.py", CONFIG.format(name="STDiT") + 'imports = ["broken.py"]\n')
    with pytest.raises(UserError, match=message):
        read()


def test_a_file_that_is_not_there_and_a_value_of_another_type(write):
    write("config.py", CONFIG.format(name="STDiT"))
    with pytest.raises(UserError, match=r"imports: there is no file nope.py"):
        read("--imports", "nope.py")
    write("config.py", CONFIG.format(name="STDiT") + "imports = 3\n")
    with pytest.raises(UserError, match="imports=3: expected"):
        read()


def test_stored_values_run_nothing(write):
    """A checkpoint's manifest or a sidecar may come from anybody."""
    write("evil.py", "raise SystemExit('it ran')\n")
    write("config.py", CONFIG.format(name="STDiT"))
    values = {**to_dict(read()), "imports": ["evil.py"]}
    with pytest.raises(UserError, match=r"from evil.py, which is code.*--imports evil.py"):
        config_from_dict(InferenceConfig, values, COMPONENTS)
