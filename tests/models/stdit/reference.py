"""Open-Sora's models once more, straight from the equations: one sample, loops over frames and positions, plain sums.

Weights are a state dict `p` of the model under test. Tokens are X [T, S, D], text y [L, D], real tokens only.
"""

import cmath
import math

import torch
import torch.nn.functional as F


def linear(p, name, x):
    return torch.einsum("...i,oi->...o", x, p[f"{name}.weight"]) + p[f"{name}.bias"]


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def norm(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def embed(p, name, number):
    """The embedding [D] of a number."""
    angles = [float(number) * 10000 ** (-k / 128) for k in range(128)]
    waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    return linear(p, f"{name}.mlp.2", F.silu(linear(p, f"{name}.mlp.0", waves)))


def turn(x):
    """Rotary positions by complex numbers, x [T, heads, d]: pair k of frame f turns by f * 10000^(-2k / d)."""
    T, _, d = x.shape
    pairs = torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous())
    turns = torch.tensor([[cmath.exp(1j * f * 10000 ** (-2 * k / d)) for k in range(d // 2)] for f in range(T)])
    turned = pairs * turns[:, None]
    return torch.stack([turned.real, turned.imag], dim=-1).reshape(x.shape)


def attend(q, k, v):
    """q [N, heads, d], k and v [L, heads, d] -> [N, heads * d]."""
    weights = torch.einsum("nhd,lhd->hnl", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).flatten(1)


def self_attention(p, name, x, heads, order=None):
    """x [N, D]; order: None = no rotary positions, else how they and the normalisation follow each other."""
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in linear(p, f"{name}.qkv", x).chunk(3, dim=-1))
    if order == "rope_then_norm":
        q, k = turn(q), turn(k)
    if f"{name}.q_norm.weight" in p:
        q, k = rms(q, p[f"{name}.q_norm.weight"]), rms(k, p[f"{name}.k_norm.weight"])
    if order == "norm_then_rope":
        q, k = turn(q), turn(k)
    return linear(p, f"{name}.proj", attend(q, k, v))


def cross_attention(p, name, X, y, heads):
    q = linear(p, f"{name}.q_linear", X.flatten(0, 1)).unflatten(-1, (heads, -1))
    k, v = (part.unflatten(-1, (heads, -1)) for part in linear(p, f"{name}.kv_linear", y).chunk(2, dim=-1))
    return linear(p, f"{name}.proj", attend(q, k, v)).reshape(X.shape)


def feed_forward(p, name, x):
    return linear(p, f"{name}.fc2", gelu(linear(p, f"{name}.fc1", x)))


def over_space(f, X):
    return torch.stack([f(frame) for frame in X])


def over_time(f, X):
    return torch.stack([f(X[:, s]) for s in range(X.shape[1])], dim=1)


def tokens(p, x, height, width):
    """x [C, T, H, W] -> [T, S, D] with positions, patches of 1 x 2 x 2, input_sq_size 512."""
    kernel, (_, T, H, W) = p["x_embedder.proj.weight"], x.shape
    D, h, w = len(kernel), H // 2, W // 2
    X = torch.empty(T, h * w, D)
    scale, base = math.sqrt(height * width) / 512, round(math.sqrt(h * w))
    waves = [10000 ** (-k / (D // 4)) for k in range(D // 4)]
    for i in range(h):
        for j in range(w):
            row, column = i * base / h / scale, j * base / w / scale
            encoding = [f(position * a) for position in (column, row) for f in (math.sin, math.cos) for a in waves]
            patch = x[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            content = torch.einsum("ctpq,dcpq->td", patch, kernel[:, :, 0]) + p["x_embedder.proj.bias"]
            X[:, i * w + j] = content + torch.tensor(encoding)
    return X


def text(p, y):
    return linear(p, "y_embedder.y_proj.fc2", gelu(linear(p, "y_embedder.y_proj.fc1", y)))


def modulations(p, name, t_by_frame, count):
    """`count` vectors [T, 1, D] of a shared layer, from the embedding [D] of each frame."""
    vectors = torch.stack([linear(p, f"{name}.1", F.silu(t)).reshape(count, -1) for t in t_by_frame])
    return vectors.transpose(0, 1)[:, :, None]


def block(p, name, X, y, mods, heads, *, over, order=None):
    """PixArt's block, attending over space or time; mods: six vectors [T, 1, D]."""
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = mods + p[f"{name}.scale_shift_table"][:, None, None]
    attn = over(lambda x: self_attention(p, f"{name}.attn", x, heads, order), norm(X) * (1 + scale) + shift)
    X = X + gate * attn
    X = X + cross_attention(p, f"{name}.cross_attn", X, y, heads)
    return X + gate_mlp * feed_forward(p, f"{name}.mlp", norm(X) * (1 + scale_mlp) + shift_mlp)


def block2(p, name, X, y, mods, mods_temp, heads, order):
    """STDiT2's block; mods_temp: three vectors [T, 1, D] for the temporal branch."""
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = mods + p[f"{name}.scale_shift_table"][:, None, None]
    shift_t, scale_t, gate_t = mods_temp + p[f"{name}.scale_shift_table_temporal"][:, None, None]
    h = norm(X) * (1 + scale) + shift
    X = X + gate * over_space(lambda x: self_attention(p, f"{name}.attn", x, heads), h)
    h = norm(X) * (1 + scale_t) + shift_t
    X = X + gate_t * over_time(lambda x: self_attention(p, f"{name}.attn_temp", x, heads, order), h)
    X = X + cross_attention(p, f"{name}.cross_attn", X, y, heads)
    return X + gate_mlp * feed_forward(p, f"{name}.mlp", norm(X) * (1 + scale_mlp) + shift_mlp)


def last(p, X, t_by_frame, x):
    """The final layer: [T, S, D] -> [C_out, T, H, W]."""
    shift, scale = p["final_layer.scale_shift_table"][:, None] + torch.stack(t_by_frame)[None]
    X = linear(p, "final_layer.linear", norm(X) * (1 + scale[:, None]) + shift[:, None])
    _, T, H, W = x.shape
    out = torch.empty(X.shape[-1] // 4, T, H, W)
    for s in range(X.shape[1]):
        i, j = divmod(s, W // 2)
        out[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = X[:, s].reshape(T, 2, 2, -1).permute(3, 0, 1, 2)
    return out


def frame_times(p, timestep, x_mask, T):
    """The timestep's embedding for each frame: that of 0 where the frame is not being denoised."""
    noisy = [True] * T if x_mask is None else x_mask.tolist()
    return [embed(p, "t_embedder", timestep if denoised else 0) for denoised in noisy]


def stdit2(p, x, timestep, y, *, height, width, fps, num_frames, heads, x_mask=None, order="norm_then_rope"):
    """One sample through STDiT2, [C, T, H, W] -> [C_out, T, H, W]."""
    t = frame_times(p, timestep, x_mask, x.shape[1])
    sizes = [embed(p, "csize_embedder", n) for n in (height, width)]
    size = torch.cat([*sizes, embed(p, "ar_embedder", height / width)])
    clip = embed(p, "fl_embedder", num_frames) + embed(p, "fps_embedder", fps)
    mods = modulations(p, "t_block", [v + size for v in t], 6)
    mods_temp = modulations(p, "t_block_temp", [v + clip for v in t], 3)
    X, y = tokens(p, x, height, width), text(p, y)
    for i in range(2):
        X = block2(p, f"blocks.{i}", X, y, mods, mods_temp, heads, order)
    return last(p, X, t, x)


def stdit3(p, x, timestep, y, *, height, width, fps, heads, x_mask=None, order="norm_then_rope"):
    """One sample through STDiT3, [C, T, H, W] -> [C_out, T, H, W]."""
    t = [v + embed(p, "fps_embedder", fps) for v in frame_times(p, timestep, x_mask, x.shape[1])]
    mods = modulations(p, "t_block", t, 6)
    X, y = tokens(p, x, height, width), text(p, y)
    for i in range(2):
        X = block(p, f"spatial_blocks.{i}", X, y, mods, heads, over=over_space)
        X = block(p, f"temporal_blocks.{i}", X, y, mods, heads, over=over_time, order=order)
    return last(p, X, t, x)


def pixart(p, x, timestep, y, *, height, width, heads):
    """One sample through PixArt, frame by frame; with the size embedders of its alpha MS models where `p` has them."""
    X, t = pixart_tokens(p, x, timestep, y, height=height, width=width, heads=heads)
    return last(p, X, t, x)


def pixart_tokens(p, x, timestep, y, *, height, width, heads):
    """What enters PixArt's final layer: tokens [T, S, D], and the embedding [D] of each frame."""
    t = frame_times(p, timestep, None, x.shape[1])
    if "csize_embedder.mlp.0.weight" in p:
        sizes = [embed(p, "csize_embedder", n) for n in (height, width)]
        t = [v + torch.cat([*sizes, embed(p, "ar_embedder", height / width)]) for v in t]
    mods = modulations(p, "t_block", t, 6)
    X, y = tokens(p, x, height, width), text(p, y)
    for i in range(2):
        X = block(p, f"blocks.{i}", X, y, mods, heads, over=over_space)
    return X, t
