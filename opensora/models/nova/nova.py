"""NOVA, autoregressive video generation without vector quantisation (Deng et al. 2024, arXiv:2412.14169).

A video is made frame by frame, and a frame patch by patch, in random order:

    video encoder    block-causal over frames; from the caption and the frames before t, the tokens c_t      (section 3.2)
    image encoder    sees c_t and the visible patches, and predicts a token for each of the others           (section 3.3)
    head             an MLP that denoises each patch, conditioned on the image encoder's output              (section 3.4)

It is trained and sampled by the scheduler "nova". The video encoder's patches are twice as long as the others', so it has a
quarter of the tokens. Unlike other denoisers' the forward pass takes clean frames as well as noised ones, a timestep for each
patch, and which patches are visible.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.models.denoiser import MICRO_CONDITIONS, Size
from opensora.models.layers.mlp import linear_flops
from opensora.models.layers.positions import sincos_grid
from opensora.models.loading import Conversion, load_weights
from opensora.models.nova import layers
from opensora.registry import MODELS
from opensora.utils.errors import UserError


class Past(NamedTuple):
    """The state of frame-by-frame sampling."""

    cache: Sequence[layers.KeysValues]
    first: Tensor | None  # [B, 1, Nc, D], the video encoder's output for the first frame; where there is a mixer


# share of patches that training shows on average: a half-normal variable of deviation 0.25, cut off at 0.3
MEAN_VISIBLE = 0.133


@MODELS.register_module()
class NOVA(nn.Module):
    """The three parts and what enters them.

    Args:
        in_channels: of the latent.
        caption_channels, model_max_length: of the text features; at most 512 tokens.
        width, num_heads: of both transformers.
        video_depth, image_depth: their numbers of blocks; the second is even.
        head_depth, head_width: of the head; None = `width`.
        patch_size: rows and columns of a patch; the video encoder takes twice as many.
        positions: "absolute" (fixed tables in space, a learned embedding of time), or "rotary" (three axes).
        base_size: (T, H, W) of the latent whose absolute positions other sizes are stretched to; None = positions count.
        mixer_rank: later frames enter the image encoder as changes of the first one, see `Mixer`: 0 = they do not, -1 = by a
            full map, above 0 = by one of this rank.
        motion: tokens for optical flow and frame rate after the caption; images need none. They are not trained, as published.
        trained: "all", or "image": without what only videos need, as published for text-to-image.
        class_dropout_prob: how often training drops the caption.
        from_pretrained: weights in published or own names.
    """

    varying_lengths = True  # each training step shows another number of patches

    def __init__(
        self,
        *,
        in_channels: int = 4,
        caption_channels: int = 2560,
        model_max_length: int = 256,
        width: int = 1024,
        num_heads: int = 16,
        video_depth: int = 16,
        image_depth: int = 32,
        head_depth: int = 6,
        head_width: int | None = None,
        patch_size: int = 2,
        positions: Literal["absolute", "rotary"] = "absolute",
        base_size: Sequence[int] | None = None,
        mixer_rank: int = 0,
        motion: bool = True,
        trained: Literal["all", "image"] = "all",
        class_dropout_prob: float = 0.1,
        from_pretrained: str | None = None,
    ) -> None:
        super().__init__()
        if image_depth % 2:
            raise ValueError(f"image_depth={image_depth} is odd; its two halves see different tokens.")
        if not 1 <= model_max_length <= layers.NULL_TOKENS:  # the tokens that the weights have for what a caption lacks
            raise ValueError(
                f"model_max_length={model_max_length} is not from 1 to {layers.NULL_TOKENS}: set the text encoder's."
            )
        if positions not in ("absolute", "rotary") or trained not in ("all", "image"):
            raise ValueError(f"positions={positions!r}: 'absolute' or 'rotary'; trained={trained!r}: 'all' or 'image'.")
        if positions == "rotary" and base_size is not None:
            raise ValueError("base_size is for absolute positions; rotary ones always count. Leave it out.")
        self.in_channels = self.out_channels = in_channels
        self.width, self.num_heads, self.head_dim = width, num_heads, width // num_heads
        self.model_max_length = model_max_length
        self.patch_size = (1, 2 * patch_size, 2 * patch_size)  # what sizes must be multiples of
        self.image_patch = patch_size
        self.positions, self.base_size = positions, base_size
        self.class_dropout_prob = class_dropout_prob
        self.text_embed = layers.TextEmbed(caption_channels, width)
        self.motion_embed = layers.MotionEmbed(width) if motion else None
        self.micro_conditions = (*MICRO_CONDITIONS, "flow") if motion else MICRO_CONDITIONS
        base_length = None if base_size is None else base_size[0]
        self.video_pos_embed = layers.VideoPosEmbed(width, base_length) if positions == "absolute" else None
        # the token for the frame before the first, and that for a masked patch
        self.mask_embed = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(1, width) * 0.02) for name in ("bos_token", "mask_token")}
        )
        self.video_encoder = layers.VisionTransformer(
            video_depth, width, num_heads, 2 * patch_size, in_channels, mixer_rank
        )
        self.image_encoder = layers.VisionTransformer(image_depth, width, num_heads, patch_size, in_channels)
        self.image_decoder = layers.DiffusionMLP(head_depth, head_width or width, width, patch_size, in_channels)

        # as in MAR: Xavier's uniform weights; the head's modulation and output start at zero. Their size follows the width:
        # with ViT's 0.02, much the same at a width of 1024, a small model takes longer to follow its conditions
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        head = self.image_decoder
        zero: list[Any] = [head.head, head.norm, *(block.norm1 for block in head.blocks)]
        for parameter in (parameter for module in zero for parameter in module.parameters()):
            nn.init.zeros_(parameter)

        # training on images has no gradient for some parts, and no use for others
        encoder = self.video_encoder
        of_videos = (self.video_pos_embed, encoder.patch_embed, encoder.mixer) if trained == "image" else ()
        for part in filter(None, (self.motion_embed, *of_videos)):
            part.requires_grad_(False)
        if from_pretrained is not None:
            load_weights(self, from_pretrained, convert)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        *,
        noisy: Tensor | None = None,
        visible: Tensor | None = None,
        mask: Tensor | None = None,
        fps: Tensor | None = None,
        flow: Tensor | None = None,
        **sizes: Tensor,
    ) -> Tensor:
        """The velocity eps - x of every patch of every frame, `[B, R, C, T, H, W]` fp32, in one pass (training).

        Args:
            x: clean latent [B, C, T, H, W]; frame t is predicted from those before it and its own visible patches.
            timestep: [B, R, T, N], in [0, 1000], of each patch: N = H W / patch^2.
            y: text features [B, 1, L, C_text].
            noisy: [B, R, C, T, H, W], R noised copies of x.
            visible: [B, T, V] int64, indices of the patches that the image encoder sees, row-major.
            mask: [B, L] bool, True at real text tokens.
            fps, flow: [B], frame rate and optical-flow score; needed where the model has motion tokens.
            sizes: height, width and num_frames, which are not used.

        Raises:
            UserError: another scheduler calls it, which has neither `noisy` nor `visible`.
        """
        if noisy is None or visible is None:
            raise UserError(
                "NOVA is trained and sampled patch by patch: set scheduler.type='nova', or use another model."
            )
        T, H, W = self.check_size(x.shape[2:])
        conditions = self.video_conditions(x, self.text_tokens(y, mask, fps, flow))  # [B, T, Nc, D]
        frames = rearrange(x, "B C T H W -> (B T) C H W")
        z = self.image_tokens(frames, visible.flatten(0, 1), conditions.flatten(0, 1), (H, W))
        z = rearrange(z, "(B T) N D -> B 1 T N D", T=T)
        patches = self.to_patches(noisy.transpose(2, 3))  # [B, R, T, N, C p p]
        return self.to_frames(self.image_decoder(patches, timestep, z), (H, W)).transpose(2, 3)

    # ------------------------------------------------------------------------------------- the parts, for sampling

    def text_tokens(self, y: Tensor, mask: Tensor | None, fps: Tensor | None, flow: Tensor | None) -> Tensor:
        """Caption and motion as `[B, L', D]`; a ValueError where the model has motion tokens and fps or flow is missing."""
        tokens = self.text_embed(y, mask)
        if self.motion_embed is None:
            return tokens
        if fps is None or flow is None:
            raise ValueError("this NOVA has motion tokens: it needs fps= and flow=, a tensor [B] each.")
        return torch.cat([tokens, self.motion_embed(flow.float(), fps.float()).to(tokens.dtype)], dim=1)

    def video_conditions(self, x: Tensor, text: Tensor) -> Tensor:
        """The condition of each frame, from those before it: `x [B, C, T, H, W]` -> `[B, T, Nc, D]`, all frames at once."""
        frames = torch.arange(x.shape[2], device=x.device)
        return self._conditions(x[:, :, :-1], text, frames, x.shape[2:], None)[0]

    def next_condition(
        self,
        previous: Tensor | None,
        text: Tensor,
        frame: int,
        size: Size,
        past: Past | None,
        *,
        with_positions: bool = True,
    ) -> tuple[Tensor, Past]:
        """`video_conditions` of one frame, `[B, Nc, D]`, from the one before and the past; and the next past.

        Args:
            previous: [B, C, H, W], or None for the first frame, and for one that is to know of none before it.
            text: of `text_tokens`; it goes in front of the first frame.
            frame, size: its index, and (T, H, W) of the whole latent.
            past: returned for the frame before; None for the first.
            with_positions: False leaves absolute positions out.
        """
        frames = torch.tensor([frame], device=text.device)
        x = text.new_empty(len(text), self.in_channels, 0, *size[1:]) if previous is None else previous[:, :, None]
        out, past = self._conditions(
            x, text if past is None else None, frames, size, past, with_positions=with_positions
        )
        return out[:, 0], past

    def _conditions(
        self,
        x: Tensor,
        text: Tensor | None,
        frames: Tensor,
        size: Sequence[int],
        past: Past | None,
        *,
        with_positions: bool = True,
    ) -> tuple[Tensor, Past]:
        """The conditions `[B, T, Nc, D]` of the frames with indices `frames [T]`, and the past of the next one.

        `x [B, C, T, H, W]` is the frame before each, or T - 1 frames where the first has none; `text` goes in front.
        """
        B, T, p = len(x), len(frames), 2 * self.image_patch
        encoder, grid = self.video_encoder, (size[1] // p, size[2] // p)
        tokens = encoder.patch_embed(rearrange(x, "B C T H W -> (B T) C H W"))
        tokens = rearrange(tokens, "(B T) N D -> B T N D", B=B, T=x.shape[2])
        if x.shape[2] < T:
            nothing = self.mask_embed["bos_token"].to(tokens.dtype).expand(B, 1, grid[0] * grid[1], -1)
            tokens = torch.cat([nothing, tokens], dim=1)
        if self.video_pos_embed is not None and with_positions:
            space, time = self._space_positions(grid, p, x.device), self.video_pos_embed(frames, size[0])
            tokens = tokens + (space + time[:, None]).to(tokens.dtype)  # [B, T, Nc, D]
        tokens, L = tokens.flatten(1, 2), 0
        if text is not None:
            tokens, L = torch.cat([text.to(tokens.dtype), tokens], dim=1), text.shape[1]
        allowed = None
        if T > 1:
            # text and the first frame are block 0, every later frame is a block of its own; each sees those before
            blocks = torch.cat([frames.new_zeros(L), frames.repeat_interleave(grid[0] * grid[1])])
            allowed = blocks[:, None] >= blocks[None, :]
        cache = None if past is None else past.cache
        rotary = self._rotary(frames, grid, before=L)
        out, cache = encoder.run(tokens, range(len(encoder.blocks)), allowed, rotary, cache)
        out = rearrange(encoder.norm(out)[:, L:], "B (T N) D -> B T N D", T=T)
        if encoder.mixer is None:
            return out, Past(cache, None)
        if past is None:
            first, later = out.split([1, T - 1], dim=1)
            return torch.cat([first, encoder.mixer(first, later)], dim=1), Past(cache, first)
        assert past.first is not None, "the past of a model without a mixer"
        return encoder.mixer(past.first, out), Past(cache, past.first)

    def image_tokens(
        self, x: Tensor, visible: Tensor, condition: Tensor, size: tuple[int, int], skip: Sequence[int] = ()
    ) -> Tensor:
        """A token for each patch of a frame, `[B, N, D]`, from the visible ones and the condition.

        Args:
            x: [B, C, H, W]; only visible patches are seen.
            visible: [B, V] int64.
            condition: [B, Nc, D].
            size: (H, W).
            skip: blocks to leave out, for guidance by a weaker model.
        """
        encoder, Nc = self.image_encoder, condition.shape[1]
        fine = (size[0] // self.image_patch, size[1] // self.image_patch)
        rotary = self._rotary(torch.zeros(1, device=x.device), fine, before=Nc)  # [2, Nc + N, d]
        rotary_seen = None
        if rotary is not None:  # of the condition's tokens and the visible patches, [2, B, 1, Nc + V, d]
            conditions = torch.arange(Nc, device=visible.device).expand(len(visible), -1)
            rotary_seen = rotary[:, torch.cat([conditions, visible + Nc], dim=1)][:, :, None]
        tokens = encoder.patch_embed(x)
        absent = self.mask_embed["mask_token"].to(tokens.dtype).expand_as(tokens)
        if rotary is None:
            space = self._space_positions(fine, self.image_patch, x.device).to(tokens.dtype)
            tokens, absent = tokens + space, absent + space
        at = visible[..., None].expand(-1, -1, self.width)  # [B, V, D]
        seen = torch.cat([condition.to(tokens.dtype), tokens.gather(1, at)], dim=1)
        half = len(encoder.blocks) // 2
        first, second = ([i for i in part if i not in skip] for part in (range(half), range(half, 2 * half)))
        # as many sequence lengths as counts of visible patches
        seen, _ = encoder.run(seen, first, None, rotary_seen, lengths="many")
        full = absent.scatter(1, at, seen[:, Nc:].to(absent.dtype))
        out, _ = encoder.run(torch.cat([seen[:, :Nc], full], dim=1), second, None, rotary)
        return encoder.norm(out)[:, Nc:]

    def to_patches(self, frames: Tensor) -> Tensor:
        """`[..., C, H, W] -> [..., N, C p p]`, row-major, the channel slowest."""
        p = self.image_patch
        return rearrange(frames, "... C (h ph) (w pw) -> ... (h w) (C ph pw)", ph=p, pw=p)

    def to_frames(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """`[..., N, C p p] -> [..., C, H, W]`."""
        p = self.image_patch
        return rearrange(patches, "... (h w) (C ph pw) -> ... C (h ph) (w pw)", h=size[0] // p, ph=p, pw=p)

    # ------------------------------------------------------------------------------------- what denoisers have

    def null_condition(self, batch: int) -> Tensor:
        """The `y` of "no text" `[batch, 1, L, C_text]`: the fixed tokens that fill a caption's padding."""
        return self.text_embed.weight[None, None, : self.model_max_length].expand(batch, 1, -1, -1)

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return [*self.video_encoder.blocks, *self.image_encoder.blocks, *self.image_decoder.blocks]

    @property
    def stack_depths(self) -> tuple[int, int, int]:
        """Blocks of the video encoder, the image encoder and the head, which levels of activation checkpointing count."""
        return len(self.video_encoder.blocks), len(self.image_encoder.blocks), len(self.image_decoder.blocks)

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`; of training with one noised copy, and the mean number of visible patches."""
        T, H, W = self.check_size(latent_size)
        fine = H * W // self.image_patch**2
        coarse, D, head = fine // 4, self.width, self.image_decoder
        text = text_len + (0 if self.motion_embed is None else 2)
        pairs = sum((text + (t + 1) * coarse) * coarse for t in range(T)) + text * (text + coarse)  # under the mask
        video = sum(linear_flops(block, text + T * coarse) + 4 * D * pairs for block in self.video_encoder.blocks)
        if self.video_encoder.mixer is not None:
            video += linear_flops(self.video_encoder.mixer, (T - 1) * coarse)
        half = self.image_encoder.blocks[: len(self.image_encoder.blocks) // 2]
        lengths = (coarse + int(MEAN_VISIBLE * fine), coarse + fine)
        image = sum(linear_flops(block, n) + 4 * D * n * n for n in lengths for block in half)
        image += sum(linear_flops(part, fine) for part in (head.blocks, head.head, head.norm, head.time_cond_embed))
        widths = 4 * coarse * (T - 1) * D + fine * T * D + fine * T * head.head.in_features  # of patches, when embedded
        embed = 2 * self.image_patch**2 * self.in_channels * widths + linear_flops(self.text_embed, text_len)
        return video + T * image + embed

    def check_size(self, size: Sequence[int]) -> Size:
        """The size of a latent; a UserError where height or width is no multiple of the video encoder's patch."""
        T, H, W = size
        p = self.patch_size[1]
        if H % p or W % p:
            near = [max(1, round(n / p)) * p for n in (H, W)]
            raise UserError(
                f"NOVA takes latents whose height and width are multiples of {p}; {H}x{W} is not. The nearest is "
                f"{near[0]}x{near[1]}: choose image_size accordingly."
            )
        return T, H, W

    def grid(self, latent_size: Sequence[int]) -> Size:
        """Patches along time, height and width for a latent of `latent_size`."""
        return latent_size[0], latent_size[1] // self.image_patch, latent_size[2] // self.image_patch

    def _space_positions(self, grid: tuple[int, int], patch: int, device: torch.device) -> Tensor:
        """`[H W, D]` fp32: the fixed sine-cosine table, whose sides span those of `base_size` where it is given."""
        base = None if self.base_size is None else (self.base_size[1] // patch, self.base_size[2] // patch)
        return sincos_grid(self.width, grid, base=base, device=device)

    def _rotary(self, frames: Tensor, grid: tuple[int, int], *, before: int) -> Tensor | None:
        """Rotations `[2, before + T N, d]`; the identity for the caption or conditions, which come before."""
        return None if self.positions == "absolute" else layers.rotary_3d(self.head_dim, frames, grid, before)


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """Published weights, whose names are our own, or own ones. Position tables are dropped; images need no motion tokens."""
    result = Conversion(dict(state), "NOVA")
    tables = ("pos_embed.space_embed", "pos_embed.time_embed", "pos_embed.weight", "rope.weight")
    result.drop("computed for every size", *(name for name in state if name.endswith(tables)))
    if not any(name.startswith("motion_embed.") for name in state):
        result.may_miss(model, "the file has no motion tokens", "motion_embed.")
    elif not any(name.startswith("motion_embed.") for name in model.state_dict()):
        result.drop("this model has no motion tokens", "motion_embed.")
    return result


# width and number of heads
for _name, (_width, _heads) in {"d48w768": (768, 12), "d48w1024": (1024, 16), "d48w1536": (1536, 16)}.items():
    MODELS.register_variant(f"NOVA-{_name}", NOVA, width=_width, num_heads=_heads)
MODELS.register_variant("NOVA-d48w1024-T2V", NOVA, width=1024, num_heads=16, head_depth=3, head_width=1280)
