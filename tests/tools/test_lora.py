"""tools/lora.py: what it refuses, and the command line; a whole run is in tests/scripts/test_train_lora.py."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.checkpoint.lora import Adapter, adapter_of, read_adapter, write_adapter
from opensora.checkpoint.weight_files import write_file
from opensora.config.schema import LoraOptions
from opensora.models.loading import stated_component
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tools.lora import export, main, merge

TOY = {"type": "STDiT-XXS/2", "caption_channels": 16, "model_max_length": 7}
LAYER = "blocks.0.attn.qkv"


@pytest.fixture
def base(tmp_path):
    """A model's weights in a file."""
    torch.manual_seed(0)
    save_file(MODELS.build(TOY).state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.fixture
def factors() -> dict:
    rng = torch.Generator().manual_seed(1)
    return {LAYER: (torch.randn(2, 48, generator=rng), torch.randn(144, 2, generator=rng))}


@pytest.fixture
def checkpoint(tmp_path, base, factors):
    """A checkpoint folder of a LoRA run: its average is twice its weights."""
    A, B = factors[LAYER]
    state = {f"{LAYER}.lora_A.default.weight": A, f"{LAYER}.lora_B.default.weight": B}
    config = {"model": {"type": "STDiT-XXS/2", "from_pretrained": str(base)}, "lora": {"rank": 2, "alpha": 6}}
    parts = {"model": state, "ema": {name: 2 * tensor for name, tensor in state.items()}}
    return save_checkpoint(tmp_path / "run" / "step1", parts, state={}, manifest={"config": config, "step": 1})


def test_merge_adds_the_scaled_product(checkpoint, base, factors, tmp_path):
    merge(checkpoint, tmp_path / "out.safetensors", scale=0.5, dtype="fp32")
    before, after = load_file(base), load_file(tmp_path / "out.safetensors")
    A, B = (2 * factor for factor in factors[LAYER])  # the average
    expected = before[f"{LAYER}.weight"] + 0.5 * 6 / 2 * B @ A
    torch.testing.assert_close(after.pop(f"{LAYER}.weight"), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_model_that_other_programs_do_not_know_is_exported_as_peft(checkpoint, tmp_path):
    with pytest.raises(UserError, match="STDiT-XXS/2: comfyui knows no such model; export its LoRA as peft"):
        export(checkpoint, tmp_path / "out.safetensors", form="comfyui")
    assert not (tmp_path / "out.safetensors").exists()


def test_export_takes_the_part_it_is_told(checkpoint, factors, tmp_path):
    export(checkpoint, tmp_path / "model", part="model")
    adapter = read_adapter(tmp_path / "model")
    assert adapter.scale == 3
    assert all(torch.equal(a, b) for a, b in zip(adapter.factors[LAYER], factors[LAYER], strict=True))
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6, [LAYER])
    export(checkpoint, tmp_path / "average")
    assert torch.equal(read_adapter(tmp_path / "average").factors[LAYER][0], 2 * factors[LAYER][0])
    with pytest.raises(UserError, match="there already"):
        export(checkpoint, tmp_path / "model")


def test_an_exported_adapter_needs_to_be_told_its_model(factors, base, tmp_path):
    folder = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter")
    with pytest.raises(UserError, match="--config"):
        merge(folder, tmp_path / "out.safetensors", base=str(base))
    (tmp_path / "config.py").write_text('model = dict(type="STDiT-XXS/2")\n')
    with pytest.raises(UserError, match="--base"):
        merge(folder, tmp_path / "out.safetensors", config=tmp_path / "config.py")
    assert merge(folder, tmp_path / "out.safetensors", base=str(base), config=tmp_path / "config.py") > 0


def test_what_an_exported_adapter_and_its_base_state_is_enough(checkpoint, base, factors, tmp_path):
    folder = export(checkpoint, tmp_path / "adapter")
    stated = {"type": "STDiT-XXS/2", "space_scale": 0.5}  # its sizes are shown by the tensors
    write_file(load_file(base), tmp_path / "stated.safetensors", dtype="fp32", header={"config": stated})
    base.unlink()
    with pytest.raises(
        UserError, match=rf"no weights at {base}.*\nThe base, {base}, is what .*adapter_config.json names"
    ):
        merge(folder, tmp_path / "out.safetensors")
    (tmp_path / "stated.safetensors").rename(base)
    merge(folder, tmp_path / "out.safetensors", dtype="fp32")
    merge(checkpoint, tmp_path / "same.safetensors", dtype="fp32")
    one, two = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "same.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert stated_component(tmp_path / "out.safetensors") == stated


def test_a_folder_that_is_not_there_is_missing_and_nothing_else(checkpoint, tmp_path):
    for read in (read_adapter, lambda path: merge(path, tmp_path / "out.safetensors")):
        with pytest.raises(UserError, match=r"no checkpoint at .*step2: there is no such folder.*in .*run: step1"):
            read(checkpoint.parent / "step2")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_model.safetensors", LFS, "is a Git LFS pointer.*git lfs pull"),
        ("adapter_model.safetensors", b"", "it is empty"),
        ("adapter_config.json", LFS, r"adapter_config\.json is no valid JSON"),
        ("adapter_config.json", b'{"r": 2', r"adapter_config\.json is no valid JSON"),
        ("adapter_config.json", b"\xff\xfe", r"adapter_config\.json is no valid JSON"),
        ("adapter_config.json", b"[1]", r"adapter_config\.json holds a list; expected an object"),
    ],
)
def test_a_damaged_folder(factors, tmp_path, file, content, message):
    folder = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter")
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_adapter(folder)


def test_weights_that_are_cut_off(factors, tmp_path):
    file = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="seems damaged"):
        read_adapter(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("r", None, "r=None and lora_alpha=.* must be a whole number from 1 and a number"),
        ("r", 0, "r=0 and"),
        ("r", "8", "r='8' and"),
        ("lora_alpha", None, "lora_alpha=None must be"),
        ("lora_alpha", float("nan"), "lora_alpha=nan must be"),
        ("layer_replication", [[0, 4], [2, 5]], "layer_replication: only LoRA and DoRA"),
        ("alora_invocation_tokens", [1, 2], "alora_invocation_tokens: only LoRA and DoRA"),
        ("use_qalora", True, "use_qalora: only LoRA and DoRA"),
        ("target_parameters", ["mlp.weight"], "target_parameters: only LoRA and DoRA"),
        ("fan_in_fan_out", True, "fan_in_fan_out: only LoRA and DoRA"),
    ],
)
def test_a_config_that_says_no_scale_or_another_kind(factors, tmp_path, key, value, message):
    file = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter") / "adapter_config.json"
    config = {**json.loads(file.read_text()), key: value}
    file.write_text(json.dumps({name: item for name, item in config.items() if item is not None}))
    with pytest.raises(UserError, match=message):
        read_adapter(file.parent)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a registered size of our own, in a file `own_size.py` of the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_size.py").write_text(
        "from opensora.models.stdit import STDiT\nfrom opensora.registry import MODELS\n"
        'MODELS.register_variant("own-size", STDiT, depth=2, hidden_size=48, num_heads=2)\n'
    )
    modules, path = set(sys.modules), list(sys.path)
    yield "own-size"
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path
    MODELS.module_dict.pop("own-size", None)


def own_base(path) -> str:
    """Weights of that size."""
    size = {"depth": 2, "hidden_size": 48, "num_heads": 2}
    save_file(MODELS.build({**TOY, "type": "STDiT-XL/2", **size}).state_dict(), path)
    return str(path)


def run(monkeypatch, *argv: object) -> None:
    monkeypatch.setattr(sys, "argv", ["lora", *map(str, argv)])
    main()


@pytest.mark.parametrize("how", ["the config", "the command line"])
def test_a_model_of_ones_own(own, factors, tmp_path, monkeypatch, how):
    base = own_base(tmp_path / "own.safetensors")
    folder = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter")
    imports = 'imports = ["own_size.py"]\n' if how == "the config" else ""
    (tmp_path / "config.py").write_text(f'model = dict(type="{own}")\n{imports}')
    flags = [] if imports else ["--imports", "own_size.py"]
    run(monkeypatch, "merge", folder, "out.safetensors", "--base", base, "--config", "config.py", *flags)
    assert load_file("out.safetensors").keys() == load_file(base).keys()


def test_a_checkpoint_does_not_run_the_code_that_it_names(own, factors, tmp_path, monkeypatch, capsys):
    A, B = factors[LAYER]
    state = {f"{LAYER}.lora_A.default.weight": A, f"{LAYER}.lora_B.default.weight": B}
    model = {"type": own, "from_pretrained": own_base(tmp_path / "own.safetensors")}
    manifest = {"config": {"model": model, "lora": {"rank": 2}, "imports": ["own_size.py"]}}
    checkpoint = save_checkpoint(tmp_path / "run", {"model": state}, state={}, manifest=manifest)
    with pytest.raises(SystemExit):
        run(monkeypatch, "merge", checkpoint, "out.safetensors")
    assert "if you trust it: --imports own_size.py" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(manifest["config"]))
    with pytest.raises(SystemExit):
        run(monkeypatch, "merge", checkpoint, "out.safetensors", "--config", "config.json")
    assert "config.json, is not registered" in capsys.readouterr().err
    run(monkeypatch, "merge", checkpoint, "out.safetensors", "--imports", "own_size.py")
    assert (tmp_path / "out.safetensors").is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('model = dict(type="x")\nimports = 3\n', "imports=3: expected a list"),
        ("model = dict(depth=3)\n", "names no model"),
    ],
)
def test_a_config_that_is_wrong(factors, tmp_path, content, message):
    folder = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter")
    (tmp_path / "config.py").write_text(content)
    with pytest.raises(UserError, match=message):
        merge(folder, tmp_path / "out.safetensors", config=tmp_path / "config.py")


def test_what_is_no_lora(tmp_path, base):
    plain = save_checkpoint(tmp_path / "plain", {"model": {}}, state={}, manifest={"config": {"lora": None}})
    with pytest.raises(UserError, match="run without lora"):
        export(plain, tmp_path / "out")
    with pytest.raises(UserError, match="run without lora"):
        read_adapter(plain)
    with pytest.raises(UserError, match="it also holds"):
        read_adapter(base)
    with pytest.raises(UserError, match="it also holds"):
        adapter_of(load_file(base), base)
    with pytest.raises(UserError, match="lack lora_A or lora_B"):
        adapter_of({"a.lora_A.weight": torch.ones(1)}, "x")
    with pytest.raises(UserError, match="rank=0"):
        LoraOptions.of({"rank": 0})


def test_the_command_line(checkpoint, tmp_path, monkeypatch, capsys):
    def run(*argv: object) -> None:
        monkeypatch.setattr(sys, "argv", ["lora", *map(str, argv)])
        main()

    run("export", checkpoint, tmp_path / "adapter")
    run("merge", checkpoint.parent, "--out", tmp_path / "out.safetensors", "--scale", "0.3")
    printed = capsys.readouterr()
    assert "MB" in printed.out
    assert "newest checkpoint of the run is step1" in printed.err
    assert f"the base is {tmp_path / 'base.safetensors'}, as {checkpoint} says" in printed.err
    run("merge", checkpoint, tmp_path / "again.safetensors")
    for outs in ([], [tmp_path / "a", "--out", tmp_path / "b"]):
        with pytest.raises(SystemExit):
            run("merge", checkpoint, *outs)
    assert "as OUT or as --out FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("merge", checkpoint, tmp_path / "out.safetensors")
    assert "there already" in capsys.readouterr().err
