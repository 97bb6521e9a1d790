"""tools/estimate.py: the memory formula against what is saved and against measurements, steps and hours by hand."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig, T5Config

from opensora.config.load import TrainConfig, parse_config
from opensora.registry import DATASETS, MODELS
from opensora.utils.errors import UserError
from tests.kept_bytes import counted_bytes
from tests.models.denoisers import FAMILIES, inputs
from tests.models.vaes import PARTS as VAE_PARTS
from tests.models.vaes import VAES
from tests.models.vaes import build as build_vae
from tools import frozen_parts
from tools.activations import Activations, Counter
from tools.estimate import (
    PARTS,
    Clip,
    Machines,
    build,
    build_denoiser,
    estimate,
    main,
    memory_row,
    num_bytes,
    read_config,
    sizes_of,
    state_bytes,
)

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


def counter(model: torch.nn.Module, latent: tuple[int, int, int], dtype=torch.bfloat16, **how: bool) -> Counter:
    return Counter(copy.deepcopy(model).to("meta"), latent, dtype, **{"compiled": False, **how})


@pytest.mark.parametrize("short", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_those_that_autograd_saves(family, short):
    model = toy(family)
    cond = inputs(model, size=(4, 20, 24))
    counted = counter(model, (4, 20, 24), torch.bfloat16 if short else torch.float32)("none")
    assert 2 * counted.kept + counted.casts == pytest.approx(saved_bytes(model, cond, short=short), rel=0.05)


@pytest.mark.slow
def test_what_is_checkpointed_does_not_stay():
    def model():
        return MODELS.build({**FAMILIES["STDiT"], "depth": 2})

    count = counter(model(), (4, 8, 8), torch.float32)
    for level in ("block", "selective", "mlp"):
        assert count(level).kept == pytest.approx(counted_bytes(model, (4, 8, 8), 1, level, "fp32"), rel=0.02)
    assert count("none").work < count("selective").work < count("block").work
    assert 2 * count("block").kept < count("selective:2").kept < count("none").kept


XL, THREE, ONE_GPU = ("STDiT-XL/2", 120), ("STDiT3-XL/2", 300), Machines(1, 1, 790, 0.4)
LORA = {"rank": 32, "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]}
STREAMED = {"weight_streaming": 3, "activation_offload": True}
MEASURED = [  # H200, torch 2.11, bf16, no EMA: model and text tokens, latent, batch, blocks, LoRA, level -> engine, GPUs, GiB
    # docs/explanation/benchmarks/: wan.md; "block": diffusers' network, with bf16 weights and fp32 masters
    (("Wan2.1-T2V-1.3B", 512), (21, 60, 104), 1, "compiled", None, "selective", [("ddp", 1, 61.9)]),
    (("Wan2.1-T2V-1.3B", 512), (21, 60, 104), 1, "compiled", None, "block", [("ddp", 1, 24.2)]),
    (("Wan2.1-T2V-1.3B", 512), (21, 60, 104), 1, "eager", None, "block", [("ddp", 1, 25.5)]),
    (("Wan2.1-T2V-14B", 512), (21, 60, 104), 1, "compiled", LORA, "attention", [("ddp", 1, 75.1)]),
    (("Wan2.1-T2V-14B", 512), (21, 60, 104), 1, "compiled", LORA, "block", [("ddp", 1, 50.6)]),
    (("Wan2.2-TI2V-5B", 512), (21, 30, 52), 1, "compiled", LORA, "selective", [("ddp", 1, 46.4)]),
    (("Wan2.2-TI2V-5B", 512), (21, 30, 52), 1, "compiled", LORA, "block", [("ddp", 1, 13.6)]),
    # memory.md; not its row of "block", 18.1: a compiled block that recomputes itself takes 4 GiB more than is counted
    (("Wan2.1-T2V-14B", 512), (21, 60, 104), 1, "compiled", LORA, "attention", [("ddp", 1, 15.2)], STREAMED),
    (("Wan2.1-T2V-14B", 512), (21, 60, 104), 1, "compiled", LORA, "attention", [("ddp", 1, 14.6)], STREAMED | {"weight_streaming": 2}),
    (("Wan2.1-T2V-14B", 512), (21, 60, 104), 1, "compiled", LORA, "attention", [("ddp", 1, 13.9)],
     {"weight_streaming": 2, "activation_offload": True, "frozen_weights": "fp8"}),
    (("Wan2.2-TI2V-5B", 512), (21, 30, 52), 1, "compiled", LORA, "attention", [("ddp", 1, 4.7)], STREAMED),
    (("Wan2.2-TI2V-5B", 512), (21, 30, 52), 1, "compiled", None, "selective", [("ddp", 1, 40.3)], {"optimizer_offload": True}),
    # train_step.md, goals.md, scaling.md, engines.md
    (XL, (16, 32, 32), 8, "eager", None, "none", [("ddp", 1, 69.6)]),
    (XL, (16, 32, 32), 8, "compiled", None, "none",
     [("ddp", 1, 63.7), ("ddp", 2, 66.6), ("fsdp2 zero2", 2, 62.4), ("fsdp2 zero3", 2, 59.7), ("zero2", 2, 59.4)]),
    (XL, (16, 32, 32), 4, "compiled", None, "none", [("ddp", 2, 39.8), ("fsdp2 zero2", 2, 35.5)]),
    (XL, (16, 64, 64), 2, "compiled", None, "none", [("ddp", 1, 63.6)]),
    (XL, (16, 64, 64), 8, "compiled", None, "block", [("ddp", 1, 25.0)]),
    (XL, (64, 64, 64), 1, "compiled", None, "selective+every:8", [("ddp", 1, 74.7)]),
    (THREE, (15, 45, 80), 2, "compiled", None, "selective", [("ddp", 1, 60.8)]),
    (THREE, (15, 90, 160), 1, "compiled", None, "selective:2", [("ddp", 1, 65.5)]),
    (THREE, (15, 90, 160), 1, "compiled", None, "block", [("ddp", 1, 23.2)]),
    (THREE, (15, 60, 106), 1, "compiled", None, "block",
     [("ddp", 2, 22.5), ("fsdp2 zero2", 2, 15.6), ("fsdp2 zero3", 2, 11.4), ("zero2", 2, 13.3)]),
    (("DiT-XL/2", 1), (16, 32, 32), 8, "eager", None, "none", [("ddp", 1, 49.5)]),
    (("DiT-XL/2", 1), (16, 32, 32), 8, "compiled", None, "none", [("ddp", 1, 49.4)]),
    (("DiT-XL/2", 1), (1, 32, 32), 128, "compiled", None, "none", [("ddp", 1, 44.3)]),
]  # fmt: skip
SLOW = (pytest.mark.slow, pytest.mark.nightly)  # the compiler takes seconds


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=SLOW[:1] if row[3] == "eager" else SLOW, id=f"{row[0][0]}-{row[1:]}") for row in MEASURED],
)
def test_peaks_that_were_measured(stdit, row):
    (name, text_len), latent, batch, blocks, lora, level, found, *settings = row
    changes = {"model": {"type": name}, "compile": blocks == "compiled", "ema_device": "cpu", "lora": lora}
    changes |= {"frozen_weights": "bf16" if lora else "fp32"}
    cfg = dataclasses.replace(stdit, **changes | (settings[0] if settings else {}))
    vae = torch.nn.Module()
    vae.out_channels = MODELS.build({"type": name, "depth": 1}).in_channels
    with torch.device("meta"):
        model = build_denoiser(cfg, vae, None, text_len)
    clip = Clip("", latent, batch, None)
    kept = counter(model, latent, compiled=cfg.compile)(level)
    for engine, gpus, peak in found:
        machines = ONE_GPU._replace(gpus=gpus, per_node=gpus)
        estimated = memory_row(cfg, sizes_of(cfg, model), 0, clip, machines, engine, kept)["total"]
        print(f"{name} {latent} x {batch} {blocks} {level} {engine} x {gpus}: {estimated:.1f}, {peak} measured")
        assert estimated == pytest.approx(peak, rel=0.1)


@pytest.fixture(scope="module")
def stdit() -> TrainConfig:
    """Open-Sora 1.0's training, as configs/ has it."""
    return parse_config(TrainConfig, PARTS, ["configs/opensora/train/16x256x256.py", "--data-path=none.csv"])


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
    sharded = [dataclasses.replace(stdit, plugin="fsdp2", shard_size=n) for n in (2, 8)]
    two, eight = (state_bytes(cfg, sizes, "fsdp2 zero3", ONE_NODE) for cfg in sharded)
    assert two["optimizer"] == 4 * eight["optimizer"] == 4.0 * sizes.all
    assert eight["gradients"] == 4 * sizes.all / 8
    hybrid = state_bytes(stdit, sizes, "hybrid", ONE_NODE)
    assert hybrid["optimizer"] == sizes.all
    assert hybrid["weights"] == 8 * sizes.all  # with the buckets of gradients
    moved = dataclasses.replace(stdit, ema_device="cpu", optimizer_offload=True)
    assert (
        state_bytes(moved, sizes, "ddp", ONE_NODE)["ema"]
        == state_bytes(moved, sizes, "ddp", ONE_NODE)["optimizer"]
        == 0
    )


@pytest.mark.slow
def test_a_lora_needs_little_next_to_the_weights():
    cfg = config_of("--lora.rank=16", "--frozen-weights=bf16")
    sizes = sizes_of(cfg, build(cfg).model)
    D = 1152
    # 28 blocks: two times qkv and proj; q, kv and proj of cross-attention
    assert sizes.trained == sizes.ema == 28 * 16 * (2 * (D + 3 * D + D + D) + (D + D) + (D + 2 * D) + (D + D))
    assert sizes.moments == 8 * sizes.trained
    assert 2 * sizes.all < sizes.stored < 2.1 * sizes.all
    assert sum(state_bytes(cfg, sizes, "ddp", ONE_NODE).values()) < 2.5 * sizes.all


@pytest.mark.slow
def test_the_settings_shown_fit():
    options = ("--compile=False", "--text_encoder.between_uses=cpu", "--grad-checkpoint=none")
    fits = estimate(config_of(*options), ONE_GPU, levels=["block"], gpu_memory=[90, 24, 4.5, 2])["fits"]
    first = [found["rows"][0]["flags"].split() if found["rows"] else None for found in fits]
    assert first[0] == ["(as", "it", "is)"]
    assert first[1][0] == "--grad-checkpoint"
    assert first[2][:2] == ["--batch-size", "1"]
    assert first[3] is None
    cfg = config_of(*options[:2], *first[1])
    row = estimate(cfg, ONE_GPU, levels=[first[1][1]])["memory_gib"][0]
    assert fits[1]["rows"][0]["GiB"] == pytest.approx(row["total"])
    assert row["total"] <= 24 - 2


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_streamed_weights_are_off_the_gpu_but_for_some_blocks(lora):
    cfg = config_of(*(("--lora.rank=4", "--frozen-weights=bf16") if lora else ("--ema-device=cpu",)))
    built = build(cfg)
    sizes, clip = sizes_of(cfg, built.model), Clip("", (4, 8, 8), 1, None)
    block = num_bytes(built.model.blocks[0], frozen=lora)
    whole, streamed = (
        memory_row(
            dataclasses.replace(cfg, weight_streaming=k), sizes, 0, clip, ONE_GPU, "ddp", Activations(0, 0, 0, 0)
        )
        for k in (0, 3)
    )
    off = (28 - 3) * block if lora else (28 * 4 - 3 - 2) * block  # gradients and two moments too
    assert (whole["total"] - streamed["total"]) * 2**30 == pytest.approx(off)


def test_optimizers_have_their_own_moments(stdit):
    model, small = build(stdit).model, 0.02  # of what stays as AdamW has it
    for name, size in (("adamw8bit", 2 + 1 / 16), ("muon", 4)):
        moments = sizes_of(dataclasses.replace(stdit, optimizer=name), model).moments
        assert moments == pytest.approx(size * numel(model), rel=small * 8 / size)


@pytest.mark.slow
def test_with_batches_given_the_largest_clip_counts():
    cfg, _ = read_config(Path("configs/quickstart/buckets.py"), [])
    cfg = dataclasses.replace(cfg, bucket_config={"144p": {1: (1.0, 64), 8: (1.0, 2)}})
    for batches, name, batch in (((), "144p x 1", 64), ((1,), "144p x 8", 1)):
        row = estimate(cfg, ONE_NODE, levels=["block"], batches=batches)["memory_gib"][0]
        assert (row["clip"], row["batch"]) == (name, batch)


def test_an_epoch_may_be_less_than_a_step(stdit):
    cfg = dataclasses.replace(stdit, batch_size=1, accumulation_steps=4, epochs=10)
    (row,) = estimate(cfg, ONE_GPU, rows=3, levels=["block"])["time"]
    assert (row["steps_of_epoch"], row["steps"]) == (0.75, 7)


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


@pytest.mark.slow
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
@pytest.mark.slow
def test_a_known_t5_has_its_own_size(name, million):
    result = estimate(config_of(f"--text_encoder.from_pretrained={name}"), ONE_NODE, levels=["none"])
    assert text_million(result) == pytest.approx(million, rel=1e-3)
    assert result["notes"] == []


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
