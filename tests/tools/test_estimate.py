"""tools/estimate.py: the memory formula against what is saved and against measurements, steps and hours by hand."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig, T5Config

from opensora.config.load import TrainConfig, parse_config
from opensora.registry import DATASETS, MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import FAMILIES, inputs
from tests.models.vaes import PARTS as VAE_PARTS
from tests.models.vaes import VAES
from tests.models.vaes import build as build_vae
from tools import frozen_parts
from tools.activations import activation_bytes, block_units
from tools.estimate import PARTS, Machines, build, estimate, main, read_config, sizes_of, state_bytes

GIB = 2**30
ONE_NODE = Machines(gpus=8, per_node=8, peak_tflops=790, mfu=0.4)


def saved_bytes(model: torch.nn.Module, cond: dict, *, short: bool) -> int:
    """What autograd keeps between a forward and its backward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other storage gets its address
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=short),
    ):
        model(**cond).square().mean()
    return sum(storage.nbytes() for storage in kept.values())


def toy(family: str, depth: int = 4):
    sizes = {"depth": depth, "hidden_size": 144, "num_heads": 2, "caption_channels": 16, "model_max_length": 7}
    return MODELS.build({**FAMILIES[family], **sizes}).train()


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if not name.startswith("Wan")]
)  # it counts layers of ours
def test_activations_are_those_that_autograd_saves(family, short):
    model = toy(family)
    cond = inputs(model, size=(4, 24, 24))
    casts = 2 * sum(p.numel() for p in model.parameters() if p.ndim > 1) if short else 0
    tokens = 2 * math.prod(model.grid((4, 24, 24)))
    estimated = activation_bytes(model, tokens, 2 if short else 4, "none") + casts
    assert estimated == pytest.approx(saved_bytes(model, cond, short=short), rel=0.08)


def test_recomputing_keeps_less_in_the_expected_order():
    model = toy("STDiT", depth=6)
    levels = ("block", "attention", "every:2", "mlp", "none")
    small, *_, large = kept = [activation_bytes(model, 100, 2, level) for level in levels]
    assert kept == sorted(kept)
    units = block_units(model.blocks[0], 2)
    assert large / small == pytest.approx(6 * units.total / (6 + units.total))
    assert activation_bytes(model, 100, 2, "selective") < large


@pytest.fixture(scope="module")
def stdit() -> TrainConfig:
    """Open-Sora 1.0's training, as configs/ has it."""
    return parse_config(TrainConfig, PARTS, ["configs/opensora/train/16x256x256.py", "--data-path=none.csv"])


@pytest.mark.parametrize(
    ("engine", "level", "measured"),
    [("ddp", "block", 20.4), ("ddp", "every:2", 46.2), ("zero2", "block", 9.7), ("zero2", "every:2", 33.8)],
)
def test_measurements_of_stdit_xl_on_two_gpus(stdit, engine, level, measured):
    # 2 H100s, batch 8, 4096 tokens, compiled blocks, bf16, no EMA: GiB. A prototype's, whose fsdp2 moved bf16 weights
    built = build(stdit)
    state = state_bytes(sizes_of(stdit, built.model), engine, ONE_NODE._replace(gpus=2), shard=2, short=True)
    kept = activation_bytes(built.model, 8 * 4096, 2, level, compiled=True)
    assert (sum(state.values()) - state["ema"] + kept) / GIB == pytest.approx(measured, rel=0.15)


def test_nothing_is_stored(stdit):
    built = build(stdit)
    for part in (built.model, built.vae, built.text_encoder):
        assert {p.device.type for p in part.parameters()} == {"meta"}
    assert built.text_len == 120
    assert sum(p.numel() for p in built.text_encoder.parameters()) == 4_762_310_656  # T5 v1.1 XXL's encoder


def test_steps_and_hours_by_hand(stdit):
    result = estimate(stdit, ONE_NODE, rows=400_000, levels=["block"])
    (row,) = result["time"]
    assert (row["tokens"], row["whole_batch"], row["steps_of_epoch"]) == (4096, 64, 6250)
    assert row["steps"] == 6250 * 1000
    flops = 3 * 64 * MODELS.build({"type": "STDiT-XS/2"}).flops((16, 32, 32), 120)
    assert row["tflop_of_step"] > 10 * flops / 1e12  # XL against XS
    seconds = row["tflop_of_step"] / (8 * 790 * 0.4)
    assert row["s_of_step"] == pytest.approx(seconds)
    assert row["hours"] == pytest.approx(seconds * row["steps"] / 3600)
    assert result["legal_sp_sizes"] == [1, 2, 4, 8]


def test_sharding_divides_what_it_says(stdit):
    sizes = sizes_of(stdit, build(stdit).model)
    two, eight = (state_bytes(sizes, "fsdp2 zero3", ONE_NODE, shard=n, short=False) for n in (2, 8))
    assert two["optimizer"] == 4 * eight["optimizer"] == 4.0 * sizes.all
    assert eight["gradients"] == 4 * sizes.all / 8
    hybrid = state_bytes(sizes, "hybrid", ONE_NODE, shard=8, short=False)
    assert hybrid["optimizer"] == sizes.all
    assert hybrid["weights"] == 4 * sizes.all


def test_a_lora_needs_little_next_to_the_weights():
    argv = ["configs/opensora/train/16x256x256.py", "--data-path=none.csv", "--lora.rank=16"]
    cfg = parse_config(TrainConfig, PARTS, argv)
    sizes = sizes_of(cfg, build(cfg).model)
    D = 1152
    # 28 blocks: two times qkv and proj; q, kv and proj of cross-attention
    assert sizes.trained == 28 * 16 * (2 * (D + 3 * D + D + D) + (D + D) + (D + 2 * D) + (D + D))
    state = state_bytes(sizes, "ddp", ONE_NODE, shard=8, short=True)
    assert sum(state.values()) < 6.5 * sizes.all


def test_rows_of_buckets_come_from_the_table():
    cfg, table = read_config(Path("configs/quickstart/buckets.py"), [])
    assert table == Path("assets/clips/clips.csv")
    result = estimate(cfg, ONE_NODE._replace(gpus=2), table=table, levels=["none"])
    rows = sum(row["rows"] for row in result["time"])
    assert 0 < rows <= len(table.read_text().splitlines()) - 1
    assert len({row["clip"] for row in result["memory_gib"]}) == 1


def test_the_command_line(capsys, monkeypatch, tmp_path):
    def run(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["estimate", "configs/opensora/train/16x256x256.py", *argv])
        main()
        return capsys.readouterr().out

    result = json.loads(run("--gpus", "4", "--sp-size", "2", "--checkpoint", "block", "--json"))
    assert result["assumed"]["sp_size"] == 2
    assert result["time"][0]["whole_batch"] == 16
    assert result["time"][0]["hours"] is None
    text = run("--batches", "1", "2", "--checkpoint", "none")
    assert "| ddp" in text
    assert "assumed 40% of 790 TFLOP/s" in text
    with pytest.raises(SystemExit):
        run("--data-path", str(tmp_path / "nowhere.csv"))
    assert "there is no such file" in capsys.readouterr().err


def test_gpus_that_cannot_be_shared(stdit):
    with pytest.raises(UserError, match="does not divide"):
        estimate(dataclasses.replace(stdit, sp_size=3), ONE_NODE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "--gpus 0: it must be at least 1"),
        ({"gpus": -8}, "--gpus -8: it must be at least 1"),
        ({"per_node": 0}, "--per-node 0: it must be at least 1"),
        ({"peak_tflops": 0.0}, "--peak-tflops 0.0: it must be above 0"),
        ({"mfu": 0.0}, "--mfu 0.0: it must be above 0"),
    ],
)
def test_machines_that_there_are_not(stdit, change, message):
    with pytest.raises(UserError, match=message):
        estimate(stdit, ONE_NODE._replace(**change))


def test_groups_are_of_one_size():
    cfg = config_of("--plugin=fsdp2", "--shard-size=16")
    with pytest.raises(UserError, match=r"shard_size=16 does not divide --gpus 2\. Here it can be 1, 2\."):
        estimate(cfg, ONE_NODE._replace(gpus=2))
    assert estimate(cfg, ONE_NODE._replace(gpus=32), levels=["none"])["memory_gib"]
    nodes = ONE_NODE._replace(gpus=12, per_node=8)
    with pytest.raises(UserError, match=r"--per-node 8 does not divide --gpus 12\. Set shard_size"):
        estimate(config_of("--hybrid-zero=True"), nodes)


def config_of(*options: str) -> TrainConfig:
    return parse_config(TrainConfig, PARTS, ["configs/opensora/train/16x256x256.py", "--data-path=none.csv", *options])


def numel(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", [name for name, cfg in VAES.items() if not cfg["type"].startswith("VAE_Temporal")])
def test_a_vae_is_built_as_its_folder_says(name, tmp_path):
    vae = build_vae(name, **({"micro_frame_size": 5} if "Pipeline" in name or "V1_2" in name else {}))
    vae.save_pretrained(tmp_path / "vae")
    component = {"type": VAES[name]["type"], "from_pretrained": str(tmp_path / "vae")}
    if name.startswith("KL"):
        component |= {"from_pretrained": str(tmp_path), "subfolder": "vae"}
    with torch.device("meta"):
        found = frozen_parts.build_vae(component)
    stored = sum(p.numel() for p in found.parameters() if not p.is_meta)
    assert stored < 20  # diffusers makes some single numbers as `torch.Tensor([...])`, which knows no device
    assert type(found) is type(vae)
    assert (found.strides, found.out_channels, numel(found)) == (vae.strides, vae.out_channels, numel(vae))
    size = (vae.legal_num_frames(30), 2 * vae.strides[1], 3 * vae.strides[2])
    assert found.latent_size(size) == vae.latent_size(size)


def test_tokens_follow_the_vae_of_a_folder(tmp_path):
    build_vae("KLWan").save_pretrained(tmp_path)  # 4 x 4 x 4
    cfg = config_of("--vae", str({"type": "DiffusersVideoVAE", "from_pretrained": str(tmp_path)}), "--num-frames=17")
    (row,) = estimate(cfg, ONE_NODE, levels=["block"])["time"]
    assert row["tokens"] == 5 * 32 * 32  # 2 x 2 cells of 64 x 64 are a token
    assert build(cfg).model.in_channels == 4


@pytest.mark.slow
def test_parts_of_a_pipeline_that_are_given(tmp_path):
    pipeline = {"type": "VideoAutoencoderPipeline", "from_pretrained": "owner/name", **VAE_PARTS}
    built = build(config_of("--vae", str(pipeline)))
    assert built.vae.strides == (4, 4, 4)
    assert numel(built.vae) == numel(build_vae("VideoAutoencoderPipeline"))
    temporal = {"type": "OpenSoraVAE_V1_2", "from_pretrained": "owner/name", "vae_temporal": VAE_PARTS["vae_temporal"]}
    vae = build(config_of("--vae", str(temporal))).vae
    assert numel(vae.temporal_vae) == numel(build_vae("VAE_Temporal_SD"))
    assert numel(vae.spatial_vae) == 83_653_863
    assert vae.micro_frame_size == 17


@pytest.mark.parametrize(
    ("vae", "message"),
    [
        ({"type": "DiffusersVideoVAE", "subfolder": "vae"}, "pass its local folder, or say .* --vae.architecture"),
        ({"type": "VideoAutoencoderKL"}, "pass its local folder, or say .* --vae.architecture"),
        ({"type": "VideoAutoencoderPipeline"}, "there is no config.json .* --vae.vae_2d and --vae.vae_temporal"),
    ],
)
def test_a_vae_of_unknown_architecture_is_not_guessed(vae, message):
    with pytest.raises(UserError, match=message):
        build(config_of("--vae", str({**vae, "from_pretrained": "owner/never-downloaded"})))


def test_what_to_say_in_place_of_a_folder():
    wan = {"type": "DiffusersVideoVAE", "from_pretrained": "owner/never-downloaded", "subfolder": "vae"}
    vae = build(config_of("--vae", str(wan), "--vae.architecture.type=AutoencoderKLWan")).vae
    assert (vae.strides, vae.out_channels) == ((4, 8, 8), 16)
    assert numel(vae) == pytest.approx(126.9e6, rel=1e-3)


def test_a_vae_that_the_hubs_cache_has(tmp_path):
    folder = tmp_path / "models--owner--name"
    build_vae("KLWan").save_pretrained(folder / "snapshots" / ("0" * 40) / "vae")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    cfg = {"type": "DiffusersVideoVAE", "from_pretrained": "owner/name", "subfolder": "vae", "cache_dir": str(tmp_path)}
    assert build(config_of("--vae", str(cfg))).vae.strides == (4, 4, 4)


@pytest.mark.nightly
@pytest.mark.slow
def test_frozen_parts_in_their_format_and_where_they_are():
    def frozen(*options: str, machines: Machines = ONE_NODE, shared: bool = False) -> float:
        cfg = config_of(f"--text_encoder.shardformer={shared}", *options)
        return estimate(cfg, machines, levels=["none"])["memory_gib"][0]["frozen"] * GIB

    text, vae = 4_762_310_656, 83_653_863
    ffn_out = 24 * 10240 * 4096  # T5's, which stay fp32 in fp16
    assert frozen() == 4 * (text + vae)
    assert frozen("--text_encoder.dtype=bf16") == 2 * text + 4 * vae
    linear, rows = 24 * (4 * 4096 * 4096 + 3 * 10240 * 4096), 24 * (5 * 4096 + 2 * 10240)
    assert frozen("--text_encoder.dtype=int8") == 2 * text - linear + 4 * rows + 4 * vae
    assert frozen("--text_encoder.dtype=fp16") == 2 * text + 2 * ffn_out + 4 * vae
    assert frozen("--vae.dtype=bf16") == 4 * text + 2 * vae
    assert frozen("--text_encoder.between_uses=cpu") == frozen("--text_encoder.between_uses=unload") == 4 * vae
    assert frozen(shared=True) == 4 * text / 8 + 4 * vae
    two_nodes = ONE_NODE._replace(gpus=8, per_node=4)
    assert frozen(shared=True, machines=two_nodes) == 4 * text / 4 + 4 * vae
    one = ONE_NODE._replace(gpus=1)
    assert frozen(shared=True, machines=one) == 4 * (text + vae)


def test_stored_features_need_no_encoder():
    encoder = {"type": "t5", "from_pretrained": "DeepFloyd/t5-v1_1-xxl", "model_max_length": 200}
    with torch.device("meta"):
        found, width, length = frozen_parts.build_text({"type": "cached", "cache_dir": "nowhere", "encoder": encoder})
    assert (found, width, length) == (None, 4096, 200)
    assert frozen_parts.text_bytes({"type": "cached"}, found, 8) == 0


XXL = 4_762_310_656  # T5 v1.1's


def text_million(result: dict) -> float:
    return next(row["million"] for row in result["parameters"] if row["part"] == "text_encoder")


@pytest.mark.parametrize(
    ("name", "million"),  # of the encoder alone
    [
        ("DeepFloyd/t5-v1_1-xxl", XXL / 1e6),
        ("google/flan-t5-xxl", XXL / 1e6),
        ("google/t5-v1_1-small", 35.33),
        ("google/t5-v1_1-xl", 1223.5),
        ("google/mt5-xxl", 5655.2),
    ],
)
def test_a_known_t5_has_its_own_size(name, million):
    result = estimate(config_of(f"--text_encoder.from_pretrained={name}"), ONE_NODE, levels=["none"])
    assert text_million(result) == pytest.approx(million, rel=1e-3)
    assert result["notes"] == []


def test_a_t5_that_is_not_known_is_told_of(capsys, monkeypatch):
    def run(*argv: str) -> str:
        options = ["--text_encoder.from_pretrained=owner/never-downloaded", "--checkpoint", "none", *argv]
        monkeypatch.setattr(sys, "argv", ["estimate", "configs/opensora/train/16x256x256.py", *options])
        main()
        return capsys.readouterr().out

    (line,) = [line for line in run().splitlines() if line.startswith("note: ")]
    assert "owner/never-downloaded" in line
    assert "assumed those of T5 v1.1 XXL (4762 million" in line
    assert "--text_encoder.from_pretrained=FOLDER" in line
    result = json.loads(run("--json"))
    assert result["notes"] == [line.removeprefix("note: ")]
    assert text_million(result) == XXL / 1e6


def test_the_encoder_of_stored_features_is_told_of_too():
    encoder = {"type": "t5", "from_pretrained": "owner/never-downloaded"}
    (note,) = frozen_parts.assumptions({"type": "cached", "cache_dir": "nowhere", "encoder": encoder})
    assert "--text_encoder.encoder.from_pretrained=FOLDER" in note
    assert frozen_parts.assumptions({"type": "cached", "cache_dir": "nowhere"}) == []


def test_a_t5_of_a_folder_has_the_sizes_of_its_config(tmp_path):
    T5Config(d_model=96, d_ff=200, num_layers=3, num_heads=4, d_kv=24, vocab_size=500).save_pretrained(tmp_path)
    cfg = config_of(f"--text_encoder.from_pretrained={tmp_path}")
    result = estimate(cfg, ONE_NODE, levels=["none"])
    attention, mlp = 4 * 96 * 96, 2 * 96 * 200
    assert text_million(result) * 1e6 == pytest.approx(500 * 96 + 3 * (attention + mlp + 2 * 96) + 32 * 4 + 96)
    assert result["notes"] == []
    with torch.device("meta"):
        assert frozen_parts.build_text(cfg.text_encoder)[1] == 96


@pytest.mark.parametrize(
    ("name", "million"), [("openai/clip-vit-base-patch32", 63.2), ("openai/clip-vit-large-patch14", 123.1)]
)
def test_a_known_clip_has_its_own_size(name, million, tmp_path):
    component = {"type": "clip", "from_pretrained": name}
    with torch.device("meta"):
        encoder, width, length = frozen_parts.build_text(component)
    assert sum(p.numel() for p in encoder.parameters()) / 1e6 == pytest.approx(million, abs=0.1)
    assert (width, length) == (encoder.config.hidden_size, 1)
    assert frozen_parts.assumptions(component) == []
    whole = CLIPConfig(text_config={"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128})
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        assert frozen_parts.build_text({"type": "clip", "from_pretrained": str(tmp_path)})[1] == 64


@pytest.mark.parametrize(("kind", "assumed"), [("clip", "those of OpenAI's ViT-B/32"), ("hf", "are not counted")])
def test_other_encoders_that_are_not_known_are_told_of(kind, assumed):
    (note,) = frozen_parts.assumptions({"type": kind, "from_pretrained": "owner/never-downloaded"})
    assert assumed in note
    assert "--text_encoder.from_pretrained=FOLDER" in note


def test_a_folder_without_a_t5s_config_is_not_taken_for_one(tmp_path):
    cfg = config_of(f"--text_encoder.from_pretrained={tmp_path}")
    assert str(tmp_path) in estimate(cfg, ONE_NODE, levels=["none"])["notes"][0]
    (tmp_path / "config.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    with pytest.raises(UserError, match=r"config\.json has no 'd_model', so it is no T5's"):
        estimate(cfg, ONE_NODE, levels=["none"])


def test_numbers_that_are_none_are_refused(stdit):
    for options in ({"rows": -5}, {"batches": [0]}):
        with pytest.raises(UserError, match="each must be at least 1"):
            estimate(stdit, ONE_NODE, **options)


def test_max_steps_is_the_end_also_with_buckets():
    argv = ["configs/quickstart/held_out_buckets.py", "--data-path=assets/clips/clips.csv"]
    found = {}
    for steps in (None, 7):
        options = [] if steps is None else [f"--max-steps={steps}"]
        cfg = parse_config(TrainConfig, {**PARTS, "dataset": DATASETS}, [*argv, *options])
        table = Path(argv[1].partition("=")[2])
        found[steps] = estimate(cfg, Machines(1, 1, 790.0, 0.4), levels=["none"], table=table)["time"]
    whole, short = (sum(row["steps"] for row in found[steps]) for steps in (None, 7))
    assert len(found[7]) > 1
    assert whole > 20
    assert abs(short - 7) <= 1  # each size's are rounded
    hours = [sum(row["hours"] for row in found[steps]) for steps in (None, 7)]
    assert hours[1] == pytest.approx(hours[0] * short / whole, rel=0.2)


def test_a_table_whose_rows_fit_no_bucket_is_told(tmp_path):
    clip = Path("assets/clips/white_dog.mp4").resolve()
    rows = f"path,text,paraphrase,num_frames,height,width,fps\n{clip},a dog,a dog,2,180,320,24\n"
    (tmp_path / "short.csv").write_text(rows)
    argv = ["configs/quickstart/held_out_buckets.py", f"--data-path={tmp_path / 'short.csv'}"]
    cfg = parse_config(TrainConfig, {**PARTS, "dataset": DATASETS}, argv)
    with pytest.raises(UserError, match=r"no row of .*short\.csv fits a bucket"):
        estimate(cfg, ONE_NODE, levels=["none"], table=tmp_path / "short.csv")


def test_the_parts_of_wans_pipelines_are_known_or_read_from_their_folders(tmp_path):
    name = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    text = {"type": "t5", "from_pretrained": name, "subfolder": "text_encoder"}
    with torch.device("meta"):
        vae = frozen_parts.build_vae({"type": "DiffusersVideoVAE", "from_pretrained": name, "subfolder": "vae"})
        encoder, width, _ = frozen_parts.build_text(text)
    assert (vae.out_channels, vae.strides, vae.latent_frames(121)) == (48, (4, 16, 16), 31)
    assert (width, encoder.shared.num_embeddings, frozen_parts.assumptions(text)) == (4096, 256384, [])
    (tmp_path / "text_encoder").mkdir()
    small = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(small))
    assert frozen_parts.build_text({**text, "from_pretrained": str(tmp_path)})[1] == 16
