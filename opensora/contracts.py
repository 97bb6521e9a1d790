"""The contracts of the parts that a config names: one Protocol for each kind, and the check that a part obeys it.

The Protocols list what training and sampling call, with the arguments they pass: those before `*` by position, the others by
keyword. `opensora.registry` checks the methods of a class when a config is read, before any weights are loaded, and the
attributes, which a constructor may set, when the part is built. docs/own-parts.md shows each kind with an example.
"""

from __future__ import annotations  # torch is imported for types only: a command line is parsed without it

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

GUIDE = "docs/own-parts.md"


class PartError(ValueError):
    """A part cannot be built as a config describes it; scripts print the message, as of a `UserError`."""


class Module(Protocol):
    """What is used of `torch.nn.Module`, which models inherit from."""

    def to(self, device: Any, /) -> Any:
        """Move to a device."""

    def eval(self) -> Any:
        """Switch dropout and the like off."""

    def requires_grad_(self, requires_grad: bool, /) -> Any:  # noqa: FBT001  (torch's)
        """Freeze or unfreeze."""


class Denoiser(Module, Protocol):
    """`opensora.models.denoiser.Denoiser` has all but `forward`, and expects `y_embedder` and `blocks`."""

    def forward(
        self, x: Tensor, timestep: Tensor, /, y: Tensor, *, mask: Tensor | None, x_mask: Tensor | None, **sizes: Tensor
    ) -> Tensor:
        """x [B, C, T, H, W], timestep [B], y [B, 1, L, D], mask [B, L], x_mask [B, T], sizes [B] each -> [B, C_out, T, H, W]."""

    def null_condition(self, batch: int, /) -> Tensor:
        """The `y` of "no text", [batch, 1, L, D]."""

    def transformer_blocks(self) -> list[nn.Module]:
        """The blocks in forward order, for compilation and activation checkpointing."""

    def flops(self, latent_size: tuple[int, int, int], text_len: int, /) -> int:
        """Of one forward of one sample, for the log's MFU."""

    def grid(self, latent_size: tuple[int, int, int], /) -> tuple[int, int, int]:
        """Tokens along time, height and width."""

    @property
    def class_dropout_prob(self) -> float:
        """How often training drops the text."""

    @property
    def micro_conditions(self) -> tuple[str, ...]:
        """The names of `sizes` that `forward` is given, such as fps, height, width, num_frames."""


class VAE(Module, Protocol):
    """`opensora.models.vae.base.VideoVAE` has all but `out_channels`, and expects `strides`, `_encode` and `_decode`."""

    def moments(self, x: Tensor, /) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> raw mean and log variance [B, 2C, t, h, w]."""

    def sliced_moments(self, x: Tensor, /) -> Tensor:
        """`moments`, in micro-batches."""

    def sample(self, moments: Tensor, generators: Sequence[torch.Generator] | None, /) -> Tensor:
        """Moments -> scaled latents [B, C, t, h, w]; one generator per sample."""

    def encode(self, x: Tensor, generators: Sequence[torch.Generator] | None, /) -> Tensor:
        """`sample` of `moments`."""

    def decode(self, z: Tensor, num_frames: int, /) -> Tensor:
        """Scaled latents [B, C, t, h, w] -> x [B, 3, num_frames, H, W] in [-1, 1]."""

    def latent_size(self, size: tuple[int, int, int], /) -> tuple[int, int, int]:
        """(T, H, W) of a video -> of its latents; a UserError where the VAE takes no such."""

    def legal_size(self, size: tuple[int, int, int], /) -> tuple[int, int, int]:
        """The nearest (T, H, W) that the VAE takes."""

    def legal_num_frames(self, num_frames: int, /) -> int:
        """The nearest number of frames that the VAE takes."""

    def latent_frames(self, num_frames: int, /) -> int:
        """Latent frames of so many frames."""

    def video_frames(self, latent_frames: int, /) -> int:
        """The most frames of so many latent frames."""

    def fingerprint(self) -> str:
        """Names weights and settings: caches of latents are of one VAE."""

    @property
    def out_channels(self) -> int:
        """C of the latents."""


class TextEncoder(Module, Protocol):
    """`opensora.models.text_encoder.hf.HFTextEncoder` has all."""

    def encode(self, texts: list[str], /) -> tuple[Tensor, Tensor]:
        """B captions -> `TextCondition(y [B, 1, L, D], mask [B, L] bool)`."""

    def fingerprint(self) -> str:
        """Names weights and settings: caches of text features are of one encoder."""

    @property
    def output_dim(self) -> int:
        """D."""

    @property
    def model_max_length(self) -> int:
        """The most tokens of a caption."""


class ImageEncoder(Module, Protocol):
    """`opensora.models.image_encoder.CLIPImageEncoder` has all."""

    def encode_images(self, images: Tensor, /) -> Tensor:
        """Images [N, 3, H, W] in [-1, 1] -> features [N, L, D]."""

    @property
    def output_dim(self) -> int:
        """D."""


class Discriminator(Module, Protocol):
    """Of a VAE's training."""

    def forward(self, x: Tensor, /) -> Tensor:
        """Videos [B, 3, T, H, W] -> scores of any shape."""


class Scheduler(Protocol):
    """To train with."""

    def training_losses(
        self,
        model: Any,
        x0: Tensor,
        cond: dict[str, Tensor],
        /,
        *,
        mask: Tensor | None,
        generators: Sequence[torch.Generator],
    ) -> Tensor:
        """x0 [B, C, T, H, W], cond: keywords of the model, mask [B, T] (False: a conditioning frame) -> the loss of each sample [B]."""


class Sampler(Protocol):
    """To sample with. `opensora.schedulers.sampling.Sampler` has all, and expects `guidance` and `solver`."""

    def sample_steps(
        self,
        model: Any,
        z: Tensor,
        cond: dict[str, Tensor],
        /,
        *,
        null: dict[str, Tensor] | None,
        mask: Tensor | None,
        guidance_scale: float | None,
        generators: Sequence[torch.Generator],
    ) -> Iterator[Any]:
        """z [B, C, T, H, W] noise -> a `SamplingStep` for each step, the last with the sample."""

    @property
    def cfg_scale(self) -> float:
        """The guidance scale where a call sets none; 1: no guidance."""


class Solver(Protocol):
    """How one algorithm updates x. A new one for each sampling run, so that it may keep a history."""

    def noised(self, x_0: Tensor, noise: Tensor, index: int, /) -> Tensor:
        """The forward process: x_0 at the level before step `index`."""

    def step(self, denoise: Any, x: Tensor, index: int, active: Tensor | None, /) -> tuple[Tensor, Tensor]:
        """x after the step, and the predicted x_0.

        `active` [B, T] bool: the frames that are denoised; whatever is returned for the others is dropped. None: all.
        """

    @property
    def timesteps(self) -> Sequence[int | float]:
        """Of each step, falling: integers of a discrete training, or floats."""

    @property
    def levels(self) -> Sequence[float]:
        """Of each step, falling in (0, 1]: the noise in x as a part of the training time."""


class Dataset(Protocol):
    """`dataset[SampleKey(epoch, index)]` is a dict with video, text, fps, height, width, num_frames, index and path."""

    def __len__(self) -> int:
        """Samples of an epoch."""

    def __getitem__(self, key: Any, /) -> dict[str, Any]:
        """The sample, a function of the dataset's seed and the key alone."""

    def fingerprint(self) -> str:
        """Names the data: a run resumes on the same."""


def members(contract: type) -> dict[str, str]:
    """Each method and property of a contract -> how messages and the docs write it, as `encode(texts)`."""
    return {name: _written(name, member) for name, member in _members(contract).items()}


@cache
def has_methods(cls: type, contract: type) -> tuple[int, float]:
    """How many of the contract's own methods a class has, and their share; `forward` does not count, as any module has it."""
    names = [
        name for name, member in vars(contract).items() if name in _members(contract) and inspect.isfunction(member)
    ]
    found = [name for name in names if name != "forward" and _has(cls, name)]
    return len(found), len(found) / len(names)


def check_contract(part: object, contract: type) -> None:
    """Check all of an object, or the methods of a class, whose constructor may set the rest.

        check_contract(MyDenoiser, contracts.Denoiser)
        check_contract(MyDenoiser(depth=2), contracts.Denoiser)

    Raises:
        PartError: something is missing, or takes other arguments than it is called with; all of it is listed.
    """
    if broken := broken_contract(part, contract):
        raise PartError(broken)


def broken_contract(part: object, contract: type) -> str:
    """The message of `check_contract`; empty where the contract is kept."""
    cls = part if inspect.isclass(part) else type(part)
    lacking: list[str] = []
    wrong: list[str] = []
    later: list[str] = []
    for name, member in _members(contract).items():
        if not inspect.isfunction(member):
            if not hasattr(part, name):
                (later if part is cls else lacking).append(_written(name, member))
        elif not _has(part, name):
            lacking.append(_written(name, member))
        elif why := _refusal(part, name, inspect.signature(member)):
            wrong.append(f"{name} is called as {_written(name, member)}, but {why}")
    abstract = [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
    lacking += [_written(name, getattr(cls, name)) for name in abstract if name not in _members(contract)]
    where = f"{cls.__module__}.{cls.__qualname__}"
    problems = [f"{where} lacks: {', '.join(lacking)}"] if lacking else []
    problems += [f"{where}: {text}" for text in wrong]
    if problems and later:
        problems.append(f"also needed, if the constructor does not set them: {', '.join(later)}")
    if part is not cls and not problems and contract is Sampler and (solver := _solver(part)) is not None:
        return broken_contract(solver, Solver)
    if part is not cls and not problems and contract is Denoiser and (error := _error_of_flops(part)):
        problems.append(f"{where}: flops(latent_size, text_len) fails ({error}): write one, as its layers have none")
    return "; ".join([*problems, f"see {GUIDE}"]) if problems else ""


def _solver(sampler: Any) -> Any:
    """The solver of a `Sampler` for a toy latent; None where it has no solvers, or none for that size."""
    import torch

    try:
        return sampler.solver(torch.zeros(1, 4, 1, 8, 8), [torch.Generator()]) if hasattr(sampler, "solver") else None
    except ValueError:
        return None


def _error_of_flops(denoiser: Any) -> str:
    """Why the `flops` that a denoiser inherits cannot add up its layers, which the first step of a training would find out."""
    try:
        denoiser.flops((4, 8, 8), 8)
    except ValueError:  # no size for it
        pass
    except AttributeError as error:
        return str(error)
    return ""


@cache
def _members(contract: type) -> dict[str, Any]:
    """Methods and properties, also of the Protocols that it extends."""
    return {
        name: member
        for cls in reversed(contract.__mro__)
        for name, member in vars(cls).items()
        if cls.__module__ == __name__
        and (name in ("__len__", "__getitem__") or not name.startswith("_"))
        and (inspect.isfunction(member) or isinstance(member, property))
    }


def _written(name: str, member: Any) -> str:
    if not inspect.isfunction(member):
        return f"{name} (property)"
    parameters = [
        p.replace(
            annotation=p.empty, default=p.empty, kind=p.POSITIONAL_OR_KEYWORD if p.kind is p.POSITIONAL_ONLY else p.kind
        )
        for p in list(inspect.signature(member).parameters.values())[1:]
    ]
    return f"{name}{inspect.Signature(parameters)}"


def _has(part: object, name: str) -> bool:
    method = getattr(part, name, None)
    unset = getattr(method, "__name__", "") == "_forward_unimplemented"  # a torch.nn.Module's
    return callable(method) and not unset and not getattr(method, "__isabstractmethod__", False)


def _refusal(part: object, name: str, called: inspect.Signature) -> str:
    """Why a method of a class or an object cannot be called so; empty if it can."""
    method = getattr(part, name)
    try:
        taken = list(inspect.signature(method).parameters.values())
    except ValueError:  # not written in Python
        return ""
    if (
        inspect.isclass(part)
        and inspect.isfunction(method)
        and not isinstance(inspect.getattr_static(part, name), staticmethod)
    ):
        taken = taken[1:]  # self
    signature = inspect.Signature(taken)
    given = list(called.parameters.values())[1:]
    positional = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in given):  # a denoiser's sizes
        sizes = getattr(part, "micro_conditions", ())
        keywords += sizes if isinstance(sizes, tuple | list) else ()
    named = {p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_name = [*keywords, *(p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken)
    if refused := [name for name in by_name if name not in named and not takes_any]:
        return f"does not take {', '.join(refused)}"
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"is {name}{signature}: {error}"
    return ""
