"""The quickstart itself, on three clips: the shipped weights, every command, the files it promises, its measure."""

import json
import os
import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

import tools.quickstart.__main__
import tools.quickstart.report
from opensora.inference.build import build_components
from opensora.utils.errors import UserError
from tests.conftest import start_ranks
from tools.quickstart.__main__ import (
    CLIPS,
    ENCODING,
    MEASURING,
    RECIPES,
    SAMPLING,
    TRAINING,
    Parts,
    checkpoints,
    data_options,
    describe,
    held_out_loss,
    length,
    model_of,
    quickstart,
    read_plan,
    run_folder,
    train,
    training_config,
)
from tools.quickstart.measure import nearest
from tools.quickstart.report import read_clip, vae_psnr

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> None:
    """A command of the quickstart in a process of its own, but without the seconds in which Python imports everything."""
    start_ranks(_run, (arguments,), 1, " ".join(arguments[:2]), 600)


def _run(_: int, arguments: tuple[str, ...]) -> None:
    os.chdir(ROOT)
    sys.argv = [each for each in arguments if each != "-m"]
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code:
            raise RuntimeError(f"{arguments} ended with {exit_.code}") from exit_


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.chdir(ROOT)
    patch.setattr(tools.quickstart.__main__, "command", command)
    # on clips that the shipped model knows, so that two steps leave samples to measure
    patch.setitem(RECIPES, "pretrained", RECIPES["pretrained"]._replace(clips=CLIPS.resolve()))
    out = tmp_path_factory.mktemp("quickstart")
    try:
        yield out, quickstart("pretrained", out, max_steps=2, num_clips=3)
    finally:
        patch.undo()


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_samples_are_measured_before_and_after_training(finished):
    _, figures = finished
    assert figures["num_candidates"] == 6
    assert figures["before_right"] == figures["captions_right"] == 3
    assert figures["paraphrases_right"] >= 2
    assert figures["before_psnr"] != figures["captions_psnr"]
    assert (
        min(figures["before_psnr"], figures["captions_psnr"]) > 20
    )  # unrelated clips of this set are 8 to 12 dB apart
    assert figures["vae_psnr"] > figures["captions_psnr"]


@pytest.mark.slow
def test_it_leaves_what_it_promises(finished):
    out, figures = finished
    run = out / "000-pretrained"
    assert len(list((run / "samples").glob("*.mp4"))) == 6
    assert len(list((run / "samples_before").glob("*.mp4"))) == 3
    for name in ("contact_sheet.png", "loss.png", "clips.csv"):
        assert (run / name).stat().st_size > 1000
    assert json.loads((run / "report.json").read_text())["checkpoint"] == figures["checkpoint"]
    assert [path.name for path in checkpoints(run / "runs")] == ["epoch1-global_step2"]


@pytest.mark.slow
def test_an_interrupted_run_is_continued_and_a_finished_one_is_not(finished, tmp_path):
    plain = {"start": "pretrained", "held_out": "paraphrase", "max_steps": None, "num_clips": None}
    assert run_folder(tmp_path, plain).name == "000-pretrained"
    assert run_folder(tmp_path, plain).name == "000-pretrained"
    (tmp_path / "000-pretrained" / "report.json").write_text("{}")
    assert run_folder(tmp_path, plain).name == "001-pretrained"
    assert run_folder(tmp_path, {**plain, "start": "scratch"}).name == "002-scratch"


def test_an_interrupted_run_is_continued_with_its_own_options_alone(tmp_path, capsys):
    plain = {"start": "scratch", "held_out": "paraphrase", "max_steps": 2, "num_clips": 2}
    assert run_folder(tmp_path, plain).name == "000-scratch"
    for number, other in enumerate(({"held_out": "blind"}, {"max_steps": None}, {"num_clips": 3}), start=1):
        capsys.readouterr()
        assert run_folder(tmp_path, plain | other).name == f"{number:03d}-scratch"
        assert "was interrupted and had other options" in capsys.readouterr().out
    assert run_folder(tmp_path, plain).name == "000-scratch"
    assert "continuing" in capsys.readouterr().out
    for half in ("", '{"start":'):  # of an interruption at the very start; older runs have none
        (tmp_path / "000-scratch" / "options.json").write_text(half)
        run = run_folder(tmp_path, plain)
        assert int(run.name[:3]) > 3
        (run / "report.json").write_text("{}")


def test_other_options_leave_an_interrupted_run_as_it_is_and_come_to_their_end(monkeypatch, repo_root, tmp_path):
    """Interrupted while it samples, then called with other held-out captions."""
    monkeypatch.chdir(repo_root)
    monkeypatch.setattr(tools.quickstart.__main__, "train", lambda config, outputs, options: outputs)
    monkeypatch.setattr(tools.quickstart.report, "report", lambda *_: {})
    monkeypatch.setattr(tools.quickstart.__main__, "describe", lambda *_: "")
    places: list[str] = []

    def sample(script, *options):
        if script == "scripts/inference.py":
            places.extend(option for option in options if option.startswith("--save-dir="))
            raise KeyboardInterrupt

    monkeypatch.setattr(tools.quickstart.__main__, "command", sample)
    with pytest.raises(KeyboardInterrupt):
        quickstart("pretrained", tmp_path, max_steps=2, num_clips=2)
    before = {path: path.read_bytes() for path in (tmp_path / "000-pretrained").iterdir()}
    assert {path.name for path in before} == {"clips.csv", "prompts_samples_before.csv", "options.json"}
    with pytest.raises(KeyboardInterrupt):
        quickstart("pretrained", tmp_path, held_out="blind")
    assert {path: path.read_bytes() for path in (tmp_path / "000-pretrained").iterdir()} == before
    monkeypatch.setattr(tools.quickstart.__main__, "command", lambda *_: None)
    quickstart("pretrained", tmp_path, held_out="blind")
    assert (tmp_path / "001-pretrained" / "report.json").is_file()
    assert places == [f"--save-dir={tmp_path / f'{number}-pretrained' / 'samples_before'}" for number in ("000", "001")]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.nightly
def test_training_goes_on_from_the_last_checkpoint(finished):
    out, _ = finished
    run = out / "000-pretrained"
    last = train(
        RECIPES["pretrained"].train,
        run / "runs",
        [*data_options(run, out, RECIPES["pretrained"].clips.parent), "--max-steps=3"],
    )
    assert last.name == "epoch1-global_step3"
    assert [folder.name for folder in sorted((run / "runs").iterdir())] == ["000-STDiT-XS-2", "001-STDiT-XS-2"]
    assert "resumed" in (run / "runs" / "001-STDiT-XS-2" / "log.txt").read_text()


def test_inference_builds_the_model_that_was_trained(monkeypatch, repo_root):
    monkeypatch.chdir(repo_root)
    assert model_of(read_plan(RECIPES["pretrained"])) == []
    assert model_of(read_plan(RECIPES["wan"])) == []
    assert set(model_of(read_plan(RECIPES["scratch"]))) == {
        "--model.depth=4",
        "--model.num_heads=4",
        "--model.patch_size=(1, 4, 4)",
    }


def test_the_plan_is_the_config_with_the_overrides(monkeypatch, repo_root):
    monkeypatch.chdir(repo_root)
    plan = read_plan(RECIPES["pretrained"])
    assert plan.inference.num_frames == plan.train.num_frames
    assert read_plan(RECIPES["pretrained"], ["--max-steps=3"]).train.max_steps == 3
    with pytest.raises(UserError, match="sets no max_steps"):
        read_plan(RECIPES["pretrained"], ["--max-steps=None"])


@pytest.mark.parametrize(
    ("capabilities", "gpu", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, False, ["--dtype=bf16", "--max-steps=1600"]),
        ({"avx512_bf16": False, "amx_bf16": True}, False, ["--dtype=bf16", "--max-steps=1600"]),
        ({"avx512_bf16": True}, True, []),
        ({"avx512_bf16": False, "avx2": True}, False, []),
        ({}, False, []),
        (None, False, []),  # PyTorch that does not say
    ],
)
def test_nova_trains_longer_in_bf16_where_the_cpu_has_it(monkeypatch, repo_root, capabilities, gpu, expected):
    monkeypatch.chdir(repo_root)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    config = "configs/quickstart/nova_images.py"
    assert length(RECIPES["nova"], config, None) == expected
    assert length(RECIPES["nova"], config, 7) == [*expected[:1], "--max-steps=7"]
    pretrained = RECIPES["pretrained"]
    assert length(pretrained, pretrained.train, None) == []
    assert length(pretrained, pretrained.train, 7) == ["--max-steps=7"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_nova_learns_images_and_goes_on_with_videos(tmp_path, monkeypatch, repo_root):
    monkeypatch.chdir(repo_root)
    monkeypatch.setattr(tools.quickstart.__main__, "command", command)
    figures = quickstart("nova", tmp_path, max_steps=2, num_clips=3)
    run = tmp_path / "000-nova"
    assert [path.name for path in checkpoints(run / "before")] == ["epoch2-global_step2"]
    log = next((run / "runs").glob("*/log.txt")).read_text()
    assert str(run / "before") in next((run / "runs").glob("*/command.txt")).read_text()
    assert "step 2" in log
    assert len(list((run / "samples").glob("*.mp4"))) == len(list((run / "images").glob("*.png"))) == 6
    assert (run / "images.png").stat().st_size > 1000
    assert 0 <= figures["images_captions_right"] <= 3


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_wan_learns_from_nothing(tmp_path, monkeypatch, repo_root):
    monkeypatch.chdir(repo_root)
    monkeypatch.setattr(tools.quickstart.__main__, "command", command)
    figures = quickstart("wan", tmp_path, max_steps=2, num_clips=3)
    run = tmp_path / "000-wan"
    assert [path.name for path in checkpoints(run / "runs")] == ["epoch2-global_step2"]
    assert len(list((run / "samples").glob("*.mp4"))) == 6
    assert figures["vae_psnr"] > figures["captions_psnr"]


@pytest.mark.parametrize(("start", "options"), [("scratch", []), ("wan", ["--epochs=4"])])
def test_a_cache_is_of_whole_clips_or_of_samples(monkeypatch, repo_root, tmp_path, start, options):
    def cache(*arguments):
        assert [option for option in arguments if option.startswith("--epochs")] == options
        raise KeyboardInterrupt

    monkeypatch.chdir(repo_root)
    monkeypatch.setattr(tools.quickstart.__main__, "command", cache)
    with pytest.raises(KeyboardInterrupt):
        quickstart(start, tmp_path)


@pytest.mark.slow
@torch.no_grad()
def test_the_shipped_wan_samples_its_clips_in_diffusers_too(monkeypatch, repo_root):
    monkeypatch.chdir(repo_root)
    plan = read_plan(RECIPES["wan"])
    cfg, table = plan.inference, pd.read_csv(CLIPS)[:4]
    model, vae, encoder, scheduler, _ = build_components(cfg)
    text, noise = encoder.encode([table["text"][0]]), torch.randn(1, 16, *vae.latent_size((9, 96, 160)))
    ours = scheduler.sample(model.eval(), noise, text._asdict())
    pipeline = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=WanTransformer3DModel.from_pretrained(cfg.model["from_pretrained"]),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=cfg.scheduler["shift"]
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt_embeds=(text.y * text.mask[:, None, :, None])[:, 0],
        latents=noise,
        height=96,
        width=160,
        num_frames=9,
        num_inference_steps=cfg.scheduler["num_sampling_steps"],
        guidance_scale=1.0,
        output_type="latent",
    ).frames
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    clips = [read_clip(CLIPS.parent / path, (96, 160)) for path in table["path"]]
    assert nearest(vae.decode(ours)[0], clips, plan.train.frame_interval) == 0


def test_the_ceiling_of_a_video_vae_is_that_of_frames_as_in_a_sample(monkeypatch, repo_root):
    monkeypatch.chdir(repo_root)
    still, noise = torch.zeros(3, 9, 32, 32), torch.rand(3, 9, 32, 32) * 2 - 1  # the first 9 frames are as in a sample
    assert vae_psnr(read_plan(RECIPES["wan"]).inference, [torch.cat([still, noise], dim=1)], 2) > 40


def test_it_says_what_comes_and_what_is_left(capsys):
    parts = Parts({"encoding": 0.5, "training": 3}, as_measured=True)
    assert parts.overview() == "2 parts, about 4 minutes on two idle CPU cores: encoding 0.5, training 3"
    with parts("training"):
        pass
    assert "2/2 training, about 3 min" in capsys.readouterr().out
    assert parts.seconds.keys() == {"training"}
    fewer = Parts({"encoding": 0.5, "training": 3}, as_measured=False)
    with fewer("encoding"):
        pass
    assert "min" not in fewer.overview() + capsys.readouterr().out


def test_every_recipe_says_its_minutes():
    for recipe in RECIPES.values():
        assert {ENCODING, TRAINING, SAMPLING, MEASURING} <= recipe.minutes.keys()


@pytest.mark.parametrize("before", [True, False])
def test_the_figures_stand_next_to_each_other(tmp_path, before):
    figures = {f"{name}_{what}": i for i, name in enumerate(("captions", "paraphrases")) for what in ("right", "psnr")}
    figures |= {"num_clips": 6, "num_candidates": 27, "vae_psnr": 28.0, "seconds": {"training": 61.4}}
    figures |= {"before_right": 5, "before_psnr": 9.25} if before else {}
    text = describe(tmp_path, figures | {"checkpoint": "runs/a b"})
    table = [" ".join(line.split()) for line in text.splitlines()[1:4]]
    assert table == [
        "before fine-tuning after after, paraphrases" if before else "after after, paraphrases",
        f"nearest of 27 clips is its own {'5/6 ' if before else ''}0/6 1/6",
        f"PSNR to the best frame of its clip {'9.2 dB ' if before else ''}0.0 dB 1.0 dB",
    ]
    assert "scripts/inference.py 'runs/a b' --prompt" in text


def test_the_held_out_loss_is_of_captions_that_are_not_trained_on(monkeypatch, repo_root, tmp_path):
    monkeypatch.chdir(repo_root)
    cfg = read_plan(RECIPES["pretrained"]).train
    table = pd.DataFrame({"path": ["a.mp4"], "text": ["a dog"], "text_2": ["a pet"], "paraphrase": ["a hound"]})
    options = held_out_loss(tmp_path, table, cfg)
    validated = training_config(RECIPES["pretrained"].train, options)
    assert (validated.val_every, cfg.max_steps) == (60, 480)
    captions = pd.read_csv(validated.val_data_path)[list(cfg.dataset["text_columns"])]
    assert set(captions.to_numpy().ravel()) == {"a hound"}
