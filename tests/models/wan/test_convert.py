"""Wan's weights in and out: every form of file, for every variant, to the bit; which files do not fit, and what is said then."""

import json
import sys

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file

from opensora.checkpoint.load import read_weights, save_checkpoint
from opensora.inference.manifest import inputs_of
from opensora.models.loading import released_weights, stated_component
from opensora.models.wan.convert import convert as to_ours
from opensora.models.wan.convert import original_name
from opensora.models.wan.wan import Wan
from opensora.registry import DENOISERS, MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import FAMILIES, TOY
from tests.models.wan.toys import TINY, VARIANTS, build
from tools.convert import convert, main
from tools.export_weights import export_weights

EXPERTS = {"t2v-a14b": {"in_channels": 4, "boundary": 0.875}}
CASES = VARIANTS | EXPERTS
ORIGINAL = [
    "head.modulation",
    "head.head.weight",
    "head.head.bias",
    "patch_embedding.weight",
    "patch_embedding.bias",
    "time_embedding.0.weight",
    "time_embedding.0.bias",
    "time_embedding.2.weight",
    "time_embedding.2.bias",
    "time_projection.1.weight",
    "time_projection.1.bias",
    "text_embedding.0.weight",
    "text_embedding.0.bias",
    "text_embedding.2.weight",
    "text_embedding.2.bias",
    "img_emb.emb_pos",
    "img_emb.proj.0.weight",
    "img_emb.proj.0.bias",
    "img_emb.proj.1.weight",
    "img_emb.proj.1.bias",
    "img_emb.proj.3.weight",
    "img_emb.proj.3.bias",
    "img_emb.proj.4.weight",
    "img_emb.proj.4.bias",
]  # of the authors' FLF2V model
OF_A_BLOCK = [
    "modulation",
    *(f"{name}.{kind}" for name in ("norm3", "ffn.0", "ffn.2") for kind in ("weight", "bias")),
    *(f"{a}_attn.{name}.{kind}" for a in ("self", "cross") for name in "qkvo" for kind in ("weight", "bias")),
    *(f"{a}_attn.norm_{name}.weight" for a in ("self", "cross") for name in "qk"),
    *(f"cross_attn.{name}_img.{kind}" for name in "kv" for kind in ("weight", "bias")),
    "cross_attn.norm_k_img.weight",
]


def component(variant, **changes):
    return {"type": "Wan", **TINY, **CASES[variant], **changes}


def made(variant, seed=0, **changes):
    """A model of random weights, none of which are alike."""
    torch.manual_seed(seed)
    model = MODELS.build(component(variant, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def loaded(variant, source, **changes):
    return MODELS.build(component(variant, from_pretrained=str(source), **changes))


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def original(net, prefix=""):
    return {prefix + original_name(name): tensor for name, tensor in net.state_dict().items()}


def pipeline(model, folder, **options):
    networks = {"transformer": model.net, "transformer_2": getattr(model, "net_2", None)}
    for name, net in networks.items():
        if net is not None:
            net.save_pretrained(folder / name, **options)
    (folder / "model_index.json").write_text("{}")
    return folder


def checkpoint(model, folder, variant, **changes):
    manifest = {"model": "Wan", "step": 1, "config": {"model": component(variant, **changes)}}
    return save_checkpoint(folder, {"ema": model.state_dict()}, state={}, manifest=manifest)


SOURCES = {
    "pipeline": lambda model, folder, variant: pipeline(model, folder),
    "transformer": lambda model, folder, variant: pipeline(model, folder) / "transformer",
    "sharded": lambda model, folder, variant: pipeline(model, folder, max_shard_size="40KB"),
    "original": lambda model, folder, variant: save_file(original(model.net), folder / "w"),
    "diffusion_model": lambda model, folder, variant: save_file(original(model.net, "diffusion_model."), folder / "w"),
    "comfyui": lambda model, folder, variant: save_file(
        {**original(model.net, "model.diffusion_model."), "first_stage_model.w": torch.ones(1)}, folder / "w"
    ),
    "ours": lambda model, folder, variant: checkpoint(model, folder / "c", variant),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_in(variant, source, tmp_path):
    model = made(variant)
    path = SOURCES[source](model, tmp_path, variant) or tmp_path / "w"
    same(loaded(variant, path).state_dict(), model.state_dict())


@pytest.mark.parametrize("to", ["diffusers", "safetensors", "comfyui"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_out_and_in_again(variant, to, tmp_path):
    model = made(variant)
    source = checkpoint(model, tmp_path / "c", variant)
    out = convert(str(source), tmp_path / "out", component(variant), to=to)
    same(loaded(variant, out).state_dict(), model.state_dict())
    if to == "diffusers":
        net, info = WanTransformer3DModel.from_pretrained(out, output_loading_info=True)
        assert not any(info.values())
        assert json.loads((out / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
        same(net.state_dict(), model.net.state_dict())
        config, expected = (json.loads(each.to_json_string()) for each in (net, model.net))
        assert {key: config[key] for key in expected if key[0] != "_"} == {
            key: value for key, value in expected.items() if key[0] != "_"
        }
    if to == "comfyui":
        names = [*ORIGINAL, *(f"blocks.{i}.{name}" for i in range(2) for name in OF_A_BLOCK)]
        names = [name for name in names if variant in ("i2v", "flf2v") or "img" not in name]
        assert sorted(read_weights(out)) == sorted(
            name for name in names if variant == "flf2v" or "emb_pos" not in name
        )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "flf2v"])  # diffusers has no name for emb_pos
def test_diffusers_reads_the_single_file(variant, tmp_path):
    model = made(variant)
    folder = pipeline(model, tmp_path)
    out = convert(str(folder), tmp_path / "o.safetensors", component(variant), to="comfyui")
    net = WanTransformer3DModel.from_single_file(str(out), config=str(folder / "transformer"))
    same(net.state_dict(), model.net.state_dict())


class TestTwoExperts:
    variant = "t2v-a14b"

    @pytest.fixture
    def both(self):
        return made(self.variant)

    def expert(self, both, name):
        return {"high": both.net, "low": both.net_2}[name].state_dict()

    @pytest.mark.parametrize("write", ["diffusers", "converted", "ours", "sharded"])
    def test_each_or_both_out_of_one_source(self, both, tmp_path, write, caplog):
        ours = str(checkpoint(both, tmp_path / "c", self.variant))
        caplog.set_level("INFO")
        if write == "converted":
            source = convert(ours, tmp_path / "out", component(self.variant), to="diffusers")
            assert sorted(path.name for path in source.iterdir()) == ["transformer", "transformer_2"]
        elif write == "ours":
            source = ours
        else:
            source = pipeline(both, tmp_path, **({"max_shard_size": "40KB"} if write == "sharded" else {}))
        same(loaded(self.variant, source).state_dict(), both.state_dict())
        assert "dropped" not in caplog.text
        for name in ("high", "low"):
            same(loaded(self.variant, source, expert=name).net.state_dict(), self.expert(both, name))

    @pytest.mark.parametrize("form", ["file", "run", "export", "pipeline"])
    def test_out_of_two(self, both, tmp_path, form):
        """Two files; two runs; one expert trained, and the other released."""
        sources = []
        for name, net in (("high", both.net), ("low", both.net_2)):
            one = build("t2v", boundary=0.875, expert=name)
            one.net.load_state_dict(net.state_dict())
            sources.append(str(checkpoint(one, tmp_path / name, self.variant, expert=name)))
            if form == "file":
                save_file(original(net), tmp_path / f"{name}.safetensors")
                sources[-1] = str(tmp_path / f"{name}.safetensors")
            elif form == "export":
                export_weights(tmp_path / name, tmp_path / f"{name}.safetensors", dtype="fp32")
                sources[-1] = str(tmp_path / f"{name}.safetensors")
                assert stated_component(sources[-1])["expert"] == name
        if form == "pipeline":
            sources[1] = str(pipeline(both, tmp_path))
        same(loaded(self.variant, sources[0], from_pretrained_2=sources[1]).state_dict(), both.state_dict())
        if form in ("run", "export"):
            with pytest.raises(
                UserError, match=r"has the weights of the low-noise expert, where those of the high-noise"
            ):
                loaded(self.variant, sources[1], from_pretrained_2=sources[0])

    def test_what_does_not_go_together(self, both, tmp_path):
        pipeline(both, tmp_path)
        folder = tmp_path / "transformer"
        save_file(original(both.net), tmp_path / "w")
        with pytest.raises(UserError, match=r"has one network, .*from_pretrained_2 to those of the low-noise one"):
            loaded(self.variant, tmp_path / "w")
        with pytest.raises(UserError, match=r"the high-noise expert, where those of the low-noise one are wanted"):
            loaded(self.variant, folder, expert="low")
        with pytest.raises(UserError, match=r"from_pretrained_2 .*goes with from_pretrained and expert='both'"):
            loaded(self.variant, tmp_path, expert="high", from_pretrained_2=str(folder))
        for source in (tmp_path, "Wan-AI/Wan2.2-T2V-A14B-Diffusers"):
            with pytest.raises(UserError, match=r"has two experts, and this model is one network: set model\.type"):
                loaded(self.variant, source, boundary=None)

    def test_a_sidecar_names_both_sources(self, tmp_path):
        config = {
            "model": {"from_pretrained": "one", "from_pretrained_2": str(tmp_path)},
            "vae": {},
            "text_encoder": {},
        }
        assert inputs_of(config, [])["weights"]["model.from_pretrained_2"]["path"] == str(tmp_path)

    def test_comfyui_has_a_file_for_each(self, both, tmp_path):
        source = str(checkpoint(both, tmp_path / "c", self.variant))
        with pytest.raises(UserError, match="write one with --set expert=high"):
            convert(source, tmp_path / "out", component(self.variant), to="comfyui")
        out = convert(source, tmp_path / "low", component(self.variant, expert="low"), to="comfyui")
        same(read_weights(out), original(both.net_2))


@pytest.mark.parametrize("expert", ["both", "low"])
def test_a_whole_pipeline_is_written(expert, tmp_path, monkeypatch, capsys):
    """All but the networks that are written is copied, and diffusers' pipeline loads it."""
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    theirs, ours = made("t2v-a14b", seed=1), made("t2v-a14b")
    parts = {"tokenizer": None, "text_encoder": None}
    networks = {"transformer": theirs.net, "transformer_2": theirs.net_2}
    WanPipeline(**parts, vae=vae, scheduler=UniPCMultistepScheduler(), **networks, boundary_ratio=0.9).save_pretrained(
        tmp_path / "theirs"
    )
    checkpoint(ours, tmp_path / "c", "t2v-a14b")
    argv = ["x", tmp_path / "c", tmp_path / "out", "--pipeline", tmp_path / "theirs", "--set", f"expert={expert}"]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    main()
    pipe = WanPipeline.from_pretrained(tmp_path / "out", **parts)
    same(pipe.transformer.state_dict(), (ours if expert == "both" else theirs).net.state_dict())
    same(pipe.transformer_2.state_dict(), ours.net_2.state_dict())
    same(pipe.vae.state_dict(), vae.state_dict())
    assert pipe.config.boundary_ratio == 0.9
    monkeypatch.setattr(sys, "argv", [*map(str, argv[:4]), str(tmp_path / "theirs" / "vae")])
    with pytest.raises(SystemExit):
        main()
    assert "has no model_index.json" in capsys.readouterr().err


def test_a_run_needs_no_arguments(tmp_path, monkeypatch):
    """The manifest lacks what a run takes from its VAE and its text encoder."""
    model = made("ti2v")
    stated = {key: value for key, value in component("ti2v").items() if key not in ("in_channels", "caption_channels")}
    manifest = {"model": "Wan", "step": 1, "config": {"model": stated}}
    save_checkpoint(tmp_path / "run" / "step1", {"ema": model.state_dict()}, state={}, manifest=manifest)
    monkeypatch.setattr(
        sys, "argv", ["x", str(tmp_path / "run"), str(tmp_path / "o"), "--to", "comfyui", "--dtype", "bf16"]
    )
    main()
    same(read_weights(tmp_path / "o"), {name: tensor.bfloat16() for name, tensor in original(model.net).items()})


class TestWhatDoesNotFit:
    @pytest.mark.parametrize("state", ["diffusers", "original"])
    def test_another_model_of_the_family_is_named(self, tmp_path, forget_own_parts, state):
        for name in ("i2v", "flf2v"):
            MODELS.register_variant(f"own-{name}", Wan, **TINY, **VARIANTS[name])
        net = made("i2v").net
        save_file(dict(net.state_dict()) if state == "diffusers" else original(net), tmp_path / "w")
        message = r"w does not fit this Wan: condition_channels is 8, not 0, image_dim is 20, not None.* of own-i2v: set model.type='own-i2v'"
        with pytest.raises(UserError, match=message):
            loaded("t2v", tmp_path / "w")
        save_file(original(made("i2v", depth=3).net), tmp_path / "w")
        with pytest.raises(UserError, match=r"depth is 3, not 2.*No registered Wan has these sizes"):
            loaded("i2v", tmp_path / "w")

    def test_the_names_of_the_released_size(self):
        with torch.device("meta"):
            state = WanTransformer3DModel().state_dict()
        with pytest.raises(
            UserError, match=r"the sizes of Wan2\.1-T2V-14B or Wan2\.2-T2V-A14B: set model\.type='Wan2\.1"
        ):
            to_ours(state, build("t2v", from_pretrained=None))

    @pytest.mark.parametrize("form", ["diffusers", "authors"])
    def test_settings_that_no_tensor_shows(self, tmp_path, form):
        pipeline(made("t2v"), tmp_path)
        file = tmp_path / "transformer" / "config.json"
        config = json.loads(file.read_text())
        if form == "authors":
            config = {"_class_name": "WanModel", "model_type": "t2v", "num_heads": 2, "eps": 1e-6, "qk_norm": True}
        file.write_text(json.dumps(config | {"rope_max_seq_len": 32, "qk_norm": True}))
        loaded("t2v", tmp_path)
        file.write_text(json.dumps(config | {"eps": 1e-5}))
        with pytest.raises(UserError, match=r"its config\.json says eps=1e-05, not 1e-06, which no argument of Wan"):
            loaded("t2v", tmp_path)
        heads = {"diffusers": {"num_attention_heads": 4, "attention_head_dim": 6}, "authors": {"num_heads": 4}}[form]
        file.write_text(json.dumps(config | heads))
        with pytest.raises(
            UserError, match=r"says 4 attention heads, the model has num_heads=2.* set model\.num_heads=4"
        ):
            loaded("t2v", tmp_path)

    def test_fp8(self, tmp_path):
        """Plain fp8 is read; with scales next to it, it means something else."""
        net = made("t2v").net
        state = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in original(net).items()}
        save_file(state, tmp_path / "w")
        weight = loaded("t2v", tmp_path / "w").net.proj_out.weight
        assert torch.equal(weight, state["head.head.weight"].float())
        save_file({**state, "blocks.0.ffn.0.scale_weight": torch.ones(1)}, tmp_path / "w")
        with pytest.raises(UserError, match=r"fp8 with scales \(such as blocks\.0\.ffn\.0\.scale_weight\)"):
            loaded("t2v", tmp_path / "w")

    def test_something_else(self, tmp_path):
        save_file({"x_embedder.proj.weight": torch.ones(1)}, tmp_path / "w")
        with pytest.raises(UserError, match=r"has no weights of Wan: they begin with x_embedder"):
            loaded("t2v", tmp_path / "w")

    def test_a_model_that_comfyui_has_not(self, tmp_path):
        model = {**TOY, **FAMILIES["STDiT"]}
        save_file(MODELS.build(model).state_dict(), tmp_path / "w")
        with pytest.raises(UserError, match="--to comfyui is for Wan"):
            convert(str(tmp_path / "w"), tmp_path / "o", model, to="comfyui")


def test_every_released_size_has_its_hub_id():
    names = [name for name in DENOISERS.choices() if name.startswith("Wan2")]
    assert len(names) == 7
    for name in names:
        for hub_id in released_weights({"type": name}):
            assert hub_id.startswith(f"Wan-AI/{name.rpartition('-')[0]}-")
            assert hub_id.lower().endswith("diffusers")
        assert released_weights({"type": name})
        assert not released_weights({"type": name, "ffn_dim": 8})
