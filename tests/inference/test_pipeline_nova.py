"""NOVA through the one sampling path: a batch is its samples, motion conditions the model, a first frame is kept, idle settings are refused."""

import pytest
import torch
from safetensors.torch import save_file

from opensora.config.load import InferenceConfig, config_from_dict, to_dict
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.references import first_and_last
from opensora.registry import MODELS
from opensora.utils.errors import UserError

NOVA = {"type": "NOVA", "width": 32, "num_heads": 2, "video_depth": 2, "image_depth": 4, "head_depth": 2}


@pytest.fixture
def nova(cfg, tmp_path):
    """`changes -> pipeline` of a NOVA with random weights and 2 x 2 steps for each of 2 frames."""
    torch.manual_seed(0)
    model = MODELS.build({**NOVA, "caption_channels": 384, "model_max_length": 16})
    save_file(
        {name: 0.2 * torch.randn(w.shape) for name, w in model.state_dict().items()}, tmp_path / "nova.safetensors"
    )
    scheduler = {"type": "nova", "num_sampling_steps": 2, "num_diffusion_steps": 2, "cfg_scale": 2.0}
    values = {**to_dict(cfg), "num_frames": 2, "model": {**NOVA, "from_pretrained": str(tmp_path / "nova.safetensors")},
              "scheduler": scheduler}  # fmt: skip

    def build(**changes):
        return VideoPipeline.from_config(config_from_dict(InferenceConfig, {**values, **changes}), "cpu")

    return build


def sample(pipeline, prompts, **options):
    return pipeline(prompts, num_frames=2, image_size=(32, 64), fps=8, seed=3, **options)


def test_a_batch_is_its_samples_and_prompts_matter(nova):
    pipeline = nova()
    both = sample(pipeline, ["a dog", "a cat on a mat"])
    alone = sample(pipeline, ["a cat on a mat"], prompt_indices=[1])
    torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=1e-4)
    assert both.isfinite().all()
    assert not torch.allclose(both[1:], sample(pipeline, ["rain"], prompt_indices=[1]))


@pytest.mark.slow
def test_motion_conditions_the_model(nova):
    one, other = (sample(nova(motion_flow=flow), ["a dog"]) for flow in (1, 20))
    assert not torch.allclose(one, other)
    torch.testing.assert_close(sample(nova(), ["a dog"]), sample(nova(motion_flow=5), ["a dog"]))


def test_bf16_is_near_fp32(nova):
    full, short = sample(nova(), ["a dog"]), sample(nova(dtype="bf16"), ["a dog"])
    assert 0 < (full - short).abs().mean() < 0.05


def test_the_weights_are_as_before_while_an_error_from_on_step_is_still_held(nova):
    pipeline = nova(dtype="bf16")
    before = {name: (p.dtype, p.data_ptr()) for name, p in pipeline.model.named_parameters()}

    def stop(step):
        assert torch.bfloat16 in {p.dtype for p in pipeline.model.parameters()}
        raise KeyError("enough")

    with pytest.raises(KeyError) as held:
        sample(pipeline, ["a dog"], on_step=stop)
    assert held.value.__traceback__ is not None  # which holds on to every frame, and to the steps in one of them
    assert {name: (p.dtype, p.data_ptr()) for name, p in pipeline.model.named_parameters()} == before


@pytest.mark.parametrize("guidance", [{"image_guidance_scale": 2.0}, {"min_cfg_scale": 3.0}])
def test_guidance_acts_also_where_that_by_text_is_off(nova, guidance):
    steps = {"type": "nova", "num_sampling_steps": 2, "num_diffusion_steps": 2, "cfg_scale": 1.0}
    plain, guided = nova(scheduler=steps), nova(scheduler={**steps, **guidance})
    assert not torch.allclose(sample(plain, ["a dog"]), sample(guided, ["a dog"]))
    # it steers away from a negative prompt too, which would be refused if nothing asked for it
    away = sample(guided, ["a dog"], negative_prompts="rain")
    assert not torch.allclose(sample(guided, ["a dog"]), away)
    with pytest.raises(UserError, match="negative_prompt has no effect"):
        sample(plain, ["a dog"], negative_prompts="rain")


@pytest.mark.slow
def test_an_image_at_the_end_is_refused_and_one_at_the_beginning_is_kept(nova):
    image = torch.zeros(3, 1, 32, 64)
    given = sample(nova(), ["a dog"], conditioning=[first_and_last(image)])
    assert not torch.allclose(given, sample(nova(), ["a dog"]))
    for conditioning in (first_and_last(None, image), first_and_last(image, image)):
        with pytest.raises(UserError, match="leave out --last-image"):
            nova()(["a dog"], num_frames=3, image_size=(32, 64), conditioning=[conditioning])


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"step_cache": {"type": "pab"}}, {"cfg_parallel": True}])
def test_what_works_on_whole_models_is_refused(nova, setting):
    with pytest.raises(UserError, match=f"{next(iter(setting))} has no effect with MaskedAutoregression"):
        nova(**setting)


def test_motion_flow_is_nova_s(cfg, caplog):
    config_from_dict(InferenceConfig, {**to_dict(cfg), "motion_flow": 5})
    assert "motion_flow=5 has no effect on a STDiT" in caplog.text
