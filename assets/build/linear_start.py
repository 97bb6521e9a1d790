"""A start for Wan 2.2's VAE in small: weights with which it is the linear codec of the training data, roughly.

A network that begins with random weights needs thousands of steps to become as good as a principal component analysis of
4x8x8 pixels, which seconds of least squares give. Here every residual branch begins at zero (its last convolution is 0),
and what is left is made linear:

- The encoder halves by collecting 2x2 pixels of 2 frames and keeping the directions of most variance; the shortcuts around
  (means) are subtracted inside. The first frame, which has no pair, has a code of its own.
- The decoder doubles by least squares on what arrives, 3x3 cells at a time.
- Both end with norm, SiLU and a convolution. silu(a) - silu(-a) = a, so everything there comes twice, with both signs; and one
  channel is the constant `LEVEL`, so large that the norm divides by nearly the same number everywhere.

Latents come out with unit variance. Training then starts from this instead of from noise.
"""

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.models.vae.video import DiffusersVideoVAE
from opensora.models.vae.wan_whole import decode_whole, encode_whole
from opensora.utils.errors import UserError

LEVEL = 40.0
LOGVAR = -6.0  # of the posterior, to begin with: 26 dB below the latents
PIXELS = 12  # channels of 2 x 2 pixels
HALF = 48  # channels after the first halving: 2 x 2 of those
KEPT = 40  # of these, means of two frames; the rest are differences
MID = 2 * HALF  # channels after the second halving
CONSTANT = 32  # the encoder's channel that is LEVEL: even, where the first frame's shortcut adds nothing
RIDGE = 1e-3  # of the mean square: larger weights fit a little better, and amplify whatever training adds before them


@torch.no_grad()
def start_linearly(vae: DiffusersVideoVAE, clips: Tensor) -> None:
    """Set all weights of `vae` from clips [N, 3, 4k + 1, H, W] in [-1, 1], k > 0, in fp32.

    Raises:
        UserError: The architecture is not the one that is meant here.
    """
    autoencoder: Any = vae.autoencoder
    _check(autoencoder.config)
    for module in autoencoder.modules():
        last = {"WanResidualBlock": "conv2", "WanAttentionBlock": "proj"}.get(type(module).__name__)
        if last is not None:
            _clear(getattr(module, last))
    pixels = rearrange(clips, "N C T (H p) (W q) -> N (C q p) T H W", p=2, q=2)  # columns before rows, as Wan has them
    half = _encode_half(autoencoder.encoder, pixels)
    _encode_rest(autoencoder, half, clips)
    z = encode_whole(autoencoder, clips)[:, : autoencoder.config.z_dim]
    _decode(autoencoder, z, half, pixels)


def _check(config: Any) -> None:
    wanted = {
        "base_dim": HALF,
        "dim_mult": [1, 2, 2],
        "temperal_downsample": [True, True],
        "patch_size": 2,
        "z_dim": 16,
    }
    wanted |= {"is_residual": True, "num_res_blocks": 1, "in_channels": PIXELS, "out_channels": PIXELS}
    wrong = {key: config[key] for key, value in wanted.items() if config[key] != value}
    if wrong or config.decoder_base_dim < 2 * PIXELS + 1 or 2 * config.decoder_base_dim < 16 + HALF + PIXELS:
        raise UserError(f"the linear start is made for an AutoencoderKLWan with {wanted}; this one has {wrong}.")


def _encode_half(encoder: Any, pixels: Tensor) -> Tensor:
    """Up to the first halving; returns its output [N, 48, 1 + 2k, H / 2, W / 2]."""
    _copy_into(encoder.conv_in, torch.eye(PIXELS), rows=0, columns=0)
    block = encoder.down_blocks[0]
    cells = _collect(pixels)  # [N, 48, T, h, w]
    basis = _principal(_samples(cells))[1].T  # [48, 48], a row is a direction
    mean = torch.zeros(HALF, HALF)
    for c in range(PIXELS):
        mean[c, 4 * c : 4 * c + 4] = 0.25
    inside = basis - 0.5 * mean  # what the shortcut adds to the first frame is subtracted
    _set_collecting(block.downsampler.resample[1], inside)
    sums, differences = torch.zeros(HALF, HALF), torch.zeros(HALF, HALF)
    sums[:KEPT, :KEPT] = 0.5 * torch.eye(KEPT)
    differences[KEPT:, : HALF - KEPT] = 0.5 * torch.eye(HALF - KEPT)
    time = _clear(block.downsampler.time_conv)
    for tap, taken in ((1, sums - differences), (2, sums + differences)):
        time.weight[:, :, tap, 0, 0] = (taken @ basis - 0.5 * mean) @ torch.linalg.inv(inside)
    return block(encoder.conv_in(pixels))


def _encode_rest(autoencoder: Any, half: Tensor, clips: Tensor) -> None:
    """From the first halving to the moments."""
    encoder = autoencoder.encoder
    block = encoder.down_blocks[1]
    _copy_into(block.resnets[0].conv_shortcut, torch.eye(HALF), rows=0, columns=0)
    conv = _set_collecting(block.downsampler.resample[1], _second_directions(half))
    conv.bias[CONSTANT] = LEVEL
    maps = block.downsampler._by_frame(block.resnets[0](half))  # [N, 96, 1 + 2k, h, w]
    both = torch.cat([maps[:, :, 1::2], maps[:, :, 2::2]], dim=1)  # [N, 192, k, h, w]
    both[:, CONSTANT] = both[:, CONSTANT + MID] = 0
    code = torch.einsum("zf,nfkhw->nzkhw", _best_code(both, clips), both)
    wanted = -block.avg_shortcut(half)[:, :, 1:]
    wanted[:, :16] += code
    wanted[:, 16:32] -= code
    taps = _least_squares(_samples(both), _samples(wanted))[:-1].T  # [96, 192]
    time = _clear(block.downsampler.time_conv)
    time.weight[:, :, 1, 0, 0], time.weight[:, :, 2, 0, 0] = taps[:, :MID], taps[:, MID:]
    time.weight[CONSTANT, CONSTANT, 2] = 1
    mid = encoder.mid_block
    for norm in (mid.resnets[0].norm1, mid.attentions[0].norm, mid.resnets[1].norm1, encoder.norm_out):
        _undo_norm(norm, CONSTANT)
    _copy_into(encoder.conv_out, torch.cat([torch.eye(16), -torch.eye(16)], dim=1), rows=0, columns=0)
    encoder.conv_out.bias[16:] = LOGVAR
    _copy_into(autoencoder.quant_conv, torch.eye(32), rows=0, columns=0)


def _second_directions(half: Tensor) -> Tensor:
    """[96, 192]: what the second halving takes of 2 x 2 cells, less what its shortcut adds to the first frame.

    16 directions are the first frame's code, which has no convolution over time behind it, then the same with the other sign;
    the others are means over the cells, which have to be there to subtract the shortcut, and what else varies most.
    """
    cells = _collect(half)
    values, vectors = _principal(_samples(cells[:, :, :1]))
    code = (vectors[:, :16] / values[:16].sqrt()).T
    means = torch.kron(torch.eye(HALF), torch.full((1, 4), 0.5))
    taken = torch.linalg.qr(torch.cat([means, code]).T).Q  # [192, 64]
    rest = _samples(cells[:, :, 1:])
    others = _principal(rest - rest @ taken @ taken.T)[1][:, : MID - 33 - HALF].T
    directions = torch.cat([code, -code, torch.zeros(1, 4 * HALF), means, others])
    directions[1::2] -= 0.5 * means  # the shortcut: channel c's mean, in channel 2c + 1
    return directions


def _best_code(features: Tensor, clips: Tensor) -> Tensor:
    """[16, 192]: the 16 numbers of unit variance, linear in the features, from which 4 x 8 x 8 pixels are best guessed."""
    x, f = rearrange(clips[:, :, 1:], "N C (k t) (h p) (w q) -> (N k h w) (C t p q)", t=4, p=8, q=8), features
    f = rearrange(f, "N C k h w -> (N k h w) C").double()
    values, vectors = torch.linalg.eigh(f.T @ f / len(f))
    sound = values > 1e-7 * values[-1]
    whiten = vectors[:, sound] / values[sound].sqrt()  # [192, r]
    right = torch.linalg.svd(x.double().T @ (f @ whiten) / len(f), full_matrices=False).Vh[:16]
    return (whiten @ right.T).T.float()


def _decode(autoencoder: Any, z: Tensor, half: Tensor, pixels: Tensor) -> None:
    """All of the decoder, by least squares on what it gets from these latents."""
    decoder = autoencoder.decoder
    width = autoencoder.config.decoder_base_dim
    _copy_into(autoencoder.post_quant_conv, torch.eye(16), rows=0, columns=0)
    _copy_into(decoder.conv_in, torch.eye(16), rows=0, columns=0)
    first, second, last = decoder.up_blocks
    # the first frame stays in channels 0..15, of the others the earlier goes to 16..31, the later to 32..47
    time = _clear(first.upsampler.time_conv)
    time.weight[16:32, :16, 2, 0, 0] = time.weight[2 * width + 32 : 2 * width + 48, :16, 2, 0, 0] = torch.eye(16)
    x = decoder.mid_block(decoder.conv_in(z))
    _fit(first.upsampler, x, half, columns=(0, 48), row=16)
    x = first(x, first_chunk=True)
    time = _clear(second.upsampler.time_conv)
    change = torch.zeros(HALF, HALF)
    change[: HALF - KEPT, KEPT:] = torch.eye(HALF - KEPT)
    means = torch.diag((torch.arange(HALF) < KEPT).float())
    here = slice(16, 16 + HALF)
    time.weight[here, here, 2, 0, 0] = means - change
    time.weight[2 * width + 16 : 2 * width + 16 + HALF, here, 2, 0, 0] = means + change
    start = 16 + HALF
    _fit(second.upsampler, x, pixels, columns=(16, start), row=start)
    both = torch.cat([torch.eye(PIXELS), -torch.eye(PIXELS)])
    _copy_into(last.resnets[0].conv_shortcut, both, rows=0, columns=start)
    last.resnets[0].conv_shortcut.bias[2 * PIXELS] = LEVEL
    for norm in (last.resnets[1].norm1, decoder.norm_out):
        _undo_norm(norm, 2 * PIXELS)
    _copy_into(decoder.conv_out, both.T, rows=0, columns=0)


def _fit(upsampler: Any, x: Tensor, wanted: Tensor, columns: tuple[int, int], row: int) -> None:
    """The convolution behind a doubling: from channels `columns` of what arrives, least squares for `wanted`, at `row`."""
    conv, low, high = upsampler.resample[1], *columns
    size = 9 * (high - low) + 1
    gram, moment = torch.zeros(size, size), torch.zeros(size, wanted.shape[1])
    kept, upsampler.resample[1] = conv, nn.Identity()
    for one, goal in zip(x.split(1), wanted.split(1), strict=True):
        up = rearrange(upsampler(one)[:, low:high], "B C T H W -> (B T) C H W")
        features = rearrange(F.unfold(up, 3, padding=1), "B C L -> (B L) C")
        features = F.pad(features, (0, 1), value=1.0)
        gram = gram + features.T @ features
        moment = moment + features.T @ rearrange(goal, "B C T H W -> (B T H W) C")
    upsampler.resample[1] = kept
    solution = _solve(gram, moment)
    rows = slice(row, row + wanted.shape[1])
    _clear(conv).weight[rows, low:high] = rearrange(
        solution[:-1], "(C h w) R -> R C h w", C=high - low, h=3, w=3
    ).float()
    conv.bias[rows] = solution[-1].float()


def _undo_norm(norm: Any, constant: int) -> None:
    """Gains with which an RMS norm leaves all channels as they are, and makes the constant one 1."""
    norm.gamma.fill_(LEVEL / math.sqrt(norm.gamma.shape[0]))
    norm.gamma[constant] = 1 / math.sqrt(norm.gamma.shape[0])


def _clear(conv: Any) -> Any:
    conv.weight.zero_()
    conv.bias.zero_()
    return conv


def _copy_into(conv: Any, matrix: Tensor, *, rows: int, columns: int) -> None:
    """A causal 3D convolution that applies `matrix` to each position by itself, to some channels."""
    _clear(conv)
    middle = conv.kernel_size[1] // 2
    conv.weight[rows : rows + len(matrix), columns : columns + matrix.shape[1], -1, middle, middle] = matrix


def _set_collecting(conv: Any, matrix: Tensor) -> Any:
    """A 3x3 convolution of stride 2 that takes its 2 x 2 cells, in the order of `_collect`."""
    _clear(conv)
    taps = rearrange(matrix, "R (C h w) -> R C h w", h=2, w=2)
    conv.weight[: len(taps), : taps.shape[1], :2, :2] = taps
    return conv


def _collect(x: Tensor) -> Tensor:
    """2 x 2 neighbours become channels: [N, C, T, H, W] -> [N, C 4, T, H / 2, W / 2]."""
    return rearrange(x, "N C T (H p) (W q) -> N (C p q) T H W", p=2, q=2)


def _samples(x: Tensor) -> Tensor:
    return rearrange(x, "N C T H W -> (N T H W) C")


def _principal(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [C] and eigenvectors [C, C] (columns) of the second moments, largest first."""
    samples = samples.double()
    values, vectors = torch.linalg.eigh(samples.T @ samples / len(samples))
    return values.flip(0).clamp_min(1e-12).float(), vectors.flip(1).float()


def _least_squares(features: Tensor, wanted: Tensor) -> Tensor:
    """[C + 1, R]: wanted from features and a constant."""
    features = F.pad(features, (0, 1), value=1.0).double()
    return _solve(features.T @ features, features.T @ wanted.double(), ridge=1e-6).float()  # shortcuts have to vanish


def _solve(gram: Tensor, moment: Tensor, ridge: float = RIDGE) -> Tensor:
    gram, moment = gram.double(), moment.double()
    added = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + added, moment)


def decoded(vae: DiffusersVideoVAE, clips: Tensor) -> Tensor:
    """What comes back of clips without noise in between, for looking at a start."""
    with torch.no_grad():
        moments = encode_whole(vae.autoencoder, clips)
        return decode_whole(vae.autoencoder, moments.chunk(2, dim=1)[0])
