"""What a part of one's own must have is checked when a config is read and when it is built, with all problems at once."""

import pytest
from torch import nn

from opensora import contracts
from opensora.config.load import InferenceConfig, TrainConfig, VAETrainConfig, config_from_dict
from opensora.contracts import PartError, check_contract
from opensora.inference.build import COMPONENTS as SAMPLING
from opensora.models.denoiser import Denoiser
from opensora.models.vae.base import VideoVAE
from opensora.registry import (
    DATASETS,
    DENOISERS,
    DISCRIMINATORS,
    IMAGE_ENCODERS,
    MODELS,
    SAMPLERS,
    SCHEDULERS,
    TEXT_ENCODERS,
    VAES,
    build_module,
)
from opensora.schedulers.guidance import Guidance
from opensora.schedulers.sampling import Sampler
from opensora.utils.errors import UserError
from tests.scripts.conftest import load_script

pytestmark = pytest.mark.usefixtures("forget_own_parts")
VALUES = {
    "model": {"type": "STDiT-XS/2"},
    "vae": {"type": "VideoAutoencoderKL"},
    "text_encoder": {"type": "t5"},
    "scheduler": {"type": "iddpm"},
}
TRAIN = {
    **VALUES,
    "num_frames": 4,
    "image_size": (32, 32),
    "dataset": {"type": "InMemoryVideoDataset"},
    "data_path": "x",
}
SAMPLE = {**VALUES, "num_frames": 4, "image_size": (32, 32), "fps": 8}


class BareModule(nn.Module):
    """Nothing but a network."""

    def forward(self, x):
        return x


class BareScheduler:
    """Nothing at all."""


class BareDataset:
    def __len__(self):
        return 1


class OfAnotherCall(Denoiser):
    """Takes no mask, and two sizes."""

    def forward(self, x, timestep, y, *, fps=None, num_frames=None):
        return x


class OwnVAE(VideoVAE):
    def _encode(self, x):
        return x


class OwnSampler(Sampler):
    """Trains, and says nothing of sampling."""

    def training_losses(self, model, x0, cond, *, mask=None, generators=None):
        return x0


class Euler:
    timesteps = (1000.0,)

    def step(self, denoise, x, index):
        return x, x


class NoLevels(OwnSampler):
    guidance = Guidance()

    def solver(self, z, generators):
        return Euler()


@pytest.fixture
def register():
    """Make the classes of this file registered names."""
    for cls in (BareModule, OfAnotherCall, OwnVAE):
        MODELS.register_module(module=cls)
    for cls in (BareScheduler, OwnSampler, NoLevels):
        SCHEDULERS.register_module(module=cls)
    DATASETS.register_module(module=BareDataset)


@pytest.mark.parametrize(
    ("field", "name", "lacking"),
    [
        ("model", "BareModule", ["null_condition(batch)", "transformer_blocks()", "does not take mask, x_mask, y"]),
        (
            "model",
            "OfAnotherCall",
            ["forward(x, timestep, y, *, mask, x_mask, **sizes)", "mask, x_mask, height, width"],
        ),
        ("vae", "BareModule", ["moments(x)", "decode(z, num_frames)", "legal_size(size)"]),
        (
            "vae",
            "OwnVAE",
            [
                "OwnVAE lacks: _decode(z, num_frames); also needed, if the constructor does not set them: out_channels (property); see docs/"
            ],
        ),
        ("text_encoder", "BareModule", ["encode(texts)", "fingerprint()"]),
        ("scheduler", "BareScheduler", []),
        ("dataset", "BareDataset", ["BareDataset lacks: __getitem__(key), fingerprint(); see docs/own-parts.md"]),
    ],
)
def test_a_class_without_its_contract_is_refused_when_the_config_is_read(register, field, name, lacking):
    """Before weights are loaded: none of these exist. In training and in sampling alike."""
    runs = [(TrainConfig, TRAIN, load_script().COMPONENTS, ["training_losses(model, x0, cond, *, mask, generators)"])]
    if field != "dataset":
        sampling = "sample_steps(model, z, cond, *, null, mask, guidance_scale, generators)"
        runs.append((InferenceConfig, SAMPLE, SAMPLING, [sampling]))
    for schema, values, components, of_schedulers in runs:
        with pytest.raises(UserError) as error:
            config_from_dict(schema, {**values, field: {"type": name}}, components)
        for text in lacking or of_schedulers:
            assert text in str(error.value)


def test_attributes_are_checked_on_the_part_itself(register):
    class NoSize(OwnVAE):
        def _decode(self, z, num_frames):
            return z

    class NoGuidance(NoLevels):
        guidance = property()

    MODELS.register_module(module=NoSize)
    SCHEDULERS.register_module(module=NoGuidance)
    assert VAES.problems({"type": "NoSize"}) == []
    with pytest.raises(PartError, match=r"NoSize lacks: out_channels \(property\); see docs/own-parts.md"):
        build_module({"type": "NoSize"}, VAES)
    with pytest.raises(PartError, match=r"NoGuidance lacks: cfg_scale \(property\)"):
        build_module({"type": "NoGuidance"}, SAMPLERS)


def test_what_only_sampling_needs_is_not_asked_of_training(register):
    class TrainsOnly(BareScheduler):
        training_losses = OwnSampler.training_losses

    SCHEDULERS.register_module(module=TrainsOnly)
    assert build_module({"type": "TrainsOnly"}, SCHEDULERS)
    with pytest.raises(PartError, match=r"TrainsOnly lacks: sample_steps\(model, z, cond, \*, null"):
        build_module({"type": "TrainsOnly"}, SAMPLERS)


def test_a_solver_is_checked_with_its_sampler(register):
    """It is made in the first step of the first sample, which may be hours after the start."""
    with pytest.raises(PartError, match=r"OwnSampler lacks: solver\(z, generators\)"):
        build_module({"type": "OwnSampler"}, SCHEDULERS)
    with pytest.raises(PartError) as error:
        build_module({"type": "NoLevels"}, SAMPLERS)
    assert "Euler lacks: noised(x_0, noise, index), levels (property)" in str(error.value)
    assert "step is called as step(denoise, x, index, active), but is step(denoise, x, index): too many" in str(
        error.value
    )
    assert build_module({"type": "NoLevels"}, SCHEDULERS)


def test_flops_that_cannot_be_added_up_are_found_when_the_model_is_built():
    """The first step counts them."""

    class NoFlops(Denoiser):
        def __init__(self):
            super().__init__(hidden_size=8, depth=1, num_heads=1)
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x, timestep, y, **cond):
            return x

    MODELS.register_module(module=NoFlops)
    with pytest.raises(
        PartError, match=r"flops\(latent_size, text_len\) fails .*'Linear' object has no attribute 'flops'"
    ):
        build_module({"type": "NoFlops"}, DENOISERS)


def test_a_part_that_makes_its_own_choice_of_sizes_needs_no_others():
    class FrameRateOnly(Denoiser):
        micro_conditions = ("fps",)

        def forward(self, x, timestep, y, *, mask=None, x_mask=None, fps=None):
            return x

    check_contract(FrameRateOnly, contracts.Denoiser)


@pytest.mark.parametrize(
    ("registry", "name", "kind"),
    [
        (DENOISERS, "VideoAutoencoderKL", "is a VAE, not a denoiser. Choices: BareModule, DiT, "),
        (DENOISERS, "PatchDiscriminator", "is a discriminator, not a denoiser"),
        (VAES, "STDiT-XL/2", "is a denoiser, not a VAE"),
        (TEXT_ENCODERS, "VAE_Temporal", "is a VAE, not a text encoder"),
        (DENOISERS, "OwnVAE", "is a VAE, not a denoiser. tests.test_contracts.OwnVAE lacks: null_condition(batch)"),
    ],
)
def test_another_kind_of_model_is_named(register, registry, name, kind):
    (problem,) = registry.problems({"type": name})
    assert problem.startswith(f"'{name}' {kind}")


def test_a_typo_lists_its_kind_alone(register):
    """With own classes that are no kind yet: their name may be what was meant."""
    (problem,) = DENOISERS.problems({"type": "STDiT-XL/3"})
    assert "Did you mean 'STDiT-XL/2'?" in problem
    assert "BareModule" in problem
    for name in ("VideoAutoencoderKL", "OwnVAE", "t5", "PatchDiscriminator"):
        assert name not in problem
    assert TEXT_ENCODERS.choices() == ["BareModule", "cached", "classes", "clip", "hf", "t5"]
    kinds = [
        set(kind.choices()) - {"BareModule"}
        for kind in (DENOISERS, VAES, TEXT_ENCODERS, IMAGE_ENCODERS, DISCRIMINATORS)
    ]
    assert set.union(*kinds) == set(MODELS.choices()) - {"BareModule"}
    assert sum(map(len, kinds)) == len(set.union(*kinds))


def test_a_vae_of_another_kind_is_refused_by_the_training_of_vaes(register):
    from scripts.train_vae import COMPONENTS

    values = {"num_frames": 4, "image_size": (32, 32), "vae": {"type": "BareModule"}, "dataset": TRAIN["dataset"]}
    with pytest.raises(UserError, match=r"vae: .*BareModule lacks: moments\(x\)"):
        config_from_dict(VAETrainConfig, {**values, "data_path": "x"}, COMPONENTS)
