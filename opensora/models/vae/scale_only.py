"""A VAE of which only the scale of the latents is here, to train from stored moments.

    z = (raw - shift) * scale,    raw ~ N(mean, var) of the moments

NOVA's video VAE (`AutoencoderKLOpenSora` of `diffnext`) is neither in diffusers nor here. The caches that its guide builds hold
its moments, and from these training takes nothing of a VAE but `sample`.
"""

import json
from pathlib import Path
from typing import Any

from opensora.checkpoint.pretrained import resolve_pretrained
from opensora.models.vae.base import Posterior, VideoVAE
from opensora.registry import MODELS
from opensora.utils.errors import UserError

CONFIG = "config.json"
NEEDED = ("latent_channels", "scaling_factor")


@MODELS.register_module()
class ScaleOnlyVAE(VideoVAE):
    """Scales stored moments as the folder's `config.json` says; it neither encodes nor decodes, and says so when asked to.

    Args:
        from_pretrained: Folder with the `config.json` of a VAE: `latent_channels`, `scaling_factor` and, if there are any,
            `shift_factor`, `latents_mean` and `latents_std`. Its weights are not read.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
    """

    def __init__(self, from_pretrained: str, posterior: Posterior = "sample") -> None:
        super().__init__(posterior=posterior)
        self.folder = resolve_pretrained(from_pretrained, what="VAE", any_of=[(CONFIG,)])
        file = Path(self.folder) / CONFIG
        if not file.is_file():  # a hub id
            raise self._error(f"there is no folder {self.folder} with a {CONFIG}; download it and pass that.")
        self.config = json.loads(file.read_text(encoding="utf-8"))
        if missing := [name for name in NEEDED if self.config.get(name) is None]:
            raise UserError(f"{file} does not say {' and '.join(missing)}, without which latents cannot be scaled.")
        self.out_channels = int(self.config["latent_channels"])
        self.set_latent_statistics()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error(
            f"of {self.config.get('_class_name', 'the VAE')} in {self.folder} there is only the scale here, which is enough to "
            "train from stored latents. To encode or decode, take a VAE of docs/reference/vae.md, and latents and a model of it."
        )

    _encode = _decode = latent_frames = video_frames = legal_num_frames = legal_size = latent_size = _refuse
