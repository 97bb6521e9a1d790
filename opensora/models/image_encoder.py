"""Images that a video is conditioned on: which of its frames a denoiser must be given, and CLIP's features of them.

CLIP's vision tower (Radford et al. 2021, arXiv:2103.00020) is what Wan 2.1's image-to-video models read next to the text.
"""

import hashlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.models.text_encoder.hf import WEIGHTS
from opensora.registry import DENOISERS, MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)


@MODELS.register_module("clip-vision")
class CLIPImageEncoder(nn.Module):
    """CLIP's vision tower: the last but one hidden state of every token, as in diffusers' `WanImageToVideoPipeline`.

    Args:
        from_pretrained: Folder or hub id of a diffusers pipeline, or `package:PACKAGE/folder`.
        subfolder, processor_subfolder: Its parts that hold the weights and the image processor's settings; "" = itself.
        dtype: Of the weights and the computation.
        cache_dir, local_files_only: Where the hub's files are kept, and whether not to ask the hub.
    """

    def __init__(
        self,
        from_pretrained: str,
        subfolder: str = "image_encoder",
        processor_subfolder: str = "image_processor",
        dtype: str | torch.dtype = "fp32",
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (as of text encoders)
    ) -> None:
        super().__init__()
        what, where = "image encoder", {"cache_dir": cache_dir, "local_files_only": local_files_only}
        name = resolve_pretrained(from_pretrained, what=what, subfolder=subfolder, any_of=[("config.json",), WEIGHTS])
        logger.info("loading the image encoder %s", from_pretrained)
        processor, vision_model = transformers.CLIPImageProcessor, transformers.CLIPVisionModel
        try:
            self.processor: Any = processor.from_pretrained(name, subfolder=processor_subfolder, **where)
            self.model, info = vision_model.from_pretrained(
                name, subfolder=subfolder, dtype=to_torch_dtype(dtype), output_loading_info=True, **where
            )
        except (OSError, ValueError) as error:
            raise hub_error(from_pretrained, what, error) from error
        if absent := sorted(info["missing_keys"]):
            raise UserError(f"{what} {from_pretrained}: its files lack {len(absent)} weights, such as {absent[0]}.")
        self.output_dim: int = self.model.config.hidden_size

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] in [-1, 1] -> features [N, L, D] fp32: of the class, then of each patch."""
        pixels = (images.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
        pixels = self.processor(list(pixels), return_tensors="pt", input_data_format="channels_first").pixel_values
        parameter = next(self.model.parameters())
        out = self.model(pixels.to(parameter.device, parameter.dtype), output_hidden_states=True)
        return out.hidden_states[-2].float()

    def fingerprint(self) -> str:
        """A hash of weights, their dtype and the processor's settings, so that features in a cache are known by it."""
        digest = hashlib.blake2b(self.processor.to_json_string().encode(), digest_size=16)
        for name, weight in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()


def required_frames(
    condition_channels: int = 0, image_dim: int | None = None, pos_embed_seq_len: int | None = None
) -> tuple[int, ...] | None:
    """The frames that a denoiser with these arguments must be given, -1 being the last; None: it takes no frames as channels."""
    if not condition_channels:
        return None
    return () if image_dim is None else (0,) if pos_embed_seq_len is None else (0, -1)


def required_frames_of(model: Mapping[str, Any]) -> tuple[int, ...] | None:
    """`required_frames` of a config's denoiser, before it is built."""
    return required_frames(**{name: argument(model, name) for name in inspect.signature(required_frames).parameters})


def check_image_encoder(model: Mapping[str, Any], image_encoder: Mapping[str, Any] | None) -> None:
    """Check that a config names an image encoder where its denoiser reads one, and nowhere else.

    Raises:
        UserError: it does not.
    """
    if (argument(model, "image_dim") is None) == (image_encoder is None):
        return
    if image_encoder is None:
        raise UserError(
            f"{model['type']} reads CLIP's features of the first image: set image_encoder=dict(type='clip-vision', "
            "from_pretrained=...) to the folder or hub id of its pipeline, which has image_encoder/ and image_processor/."
        )
    raise UserError(
        f"image_encoder has no effect on a {model['type']}, which reads no features of images: leave it out."
    )


def argument(model: Mapping[str, Any], name: str) -> Any:
    """With what a config's denoiser is built: a value of the config, or the constructor's default; None: it takes no such."""
    parameter = inspect.signature(DENOISERS.get(model["type"])).parameters.get(name)
    return model.get(name, None if parameter is None else parameter.default)
