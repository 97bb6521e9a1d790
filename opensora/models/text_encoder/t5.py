"""The encoder of T5 (Raffel et al. 2020, arXiv:1910.10683), mT5 and UMT5: the text of PixArt, Open-Sora and most others."""

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opensora.models.quantised_linear import quantise_linears
from opensora.models.text_encoder.cleaning import Clean
from opensora.models.text_encoder.hf import HFTextEncoder
from opensora.registry import MODELS

FAMILY = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Classes of transformers, by name: it imports what is asked for, and that takes seconds which a run without T5 does not need."""


@MODELS.register_module("t5")
class T5Encoder(HFTextEncoder):
    """The last hidden state of every token of a T5, mT5 or UMT5: y [B, 1, L, D], mask [B, L].

    The larger T5s overflow in fp16. There, as in `transformers`, what overflows between layers is clamped and the feed-forward
    outputs stay fp32; a result that is not finite is an error. bf16 needs none of that.

    Args:
        shardformer: The faster path, by the name that Open-Sora's configs know: compiled blocks and, in training with several
            processes, weights that those of a node share (FSDP).
        dtype: Of the weights and the computation; or "int8", in which linear layers are stored (see
            `opensora.models.quantised_linear`), for a computation in bf16.
        from_pretrained, model_max_length, clean, **options: See `HFTextEncoder`.
    """

    def __init__(
        self,
        from_pretrained: str = "DeepFloyd/t5-v1_1-xxl",
        model_max_length: int = 120,
        *,
        dtype: str | torch.dtype = "fp32",
        shardformer: bool = False,
        clean: Clean = "basic",
        **options: Any,
    ) -> None:
        self.fast, self.int8 = shardformer, dtype == "int8"  # before the weights are loaded
        super().__init__(from_pretrained, model_max_length, "bf16" if self.int8 else dtype, clean=clean, **options)

    @property
    def shards(self) -> bool:
        """Whether `shard` has an effect."""
        return self.fast and dist.is_initialized() and _processes_of_node() > 1

    def shard(self) -> "T5Encoder":
        """With `shardformer`, let a node's processes share the weights (`fully_shard`). All must then encode equally often."""
        if not self.shards:
            return self
        if self.between_uses != "keep":
            raise self._error(
                "shardformer=True shares the weights among processes, so they cannot move; drop "
                f"between_uses={self.between_uses!r}."
            )
        local = _processes_of_node()
        shape = (dist.get_world_size() // local, local)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("node", "local"))["local"]
        for block in self.model.encoder.block:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.sharded = True
        return self

    def _load_tokenizer(self) -> Any:
        try:
            return super()._load_tokenizer()
        except ValueError:  # a UMT5 folder with a spiece.model alone, which `AutoTokenizer` cannot read
            tokenizer: Any = transformers.T5Tokenizer
            return tokenizer.from_pretrained(self._tokenizer_name, **self._tokenizer_hub)

    def _from_files(self, **options: Any) -> Any:
        kind = transformers.AutoConfig.from_pretrained(self._name, **self._hub).model_type
        if kind not in FAMILY:
            raise self._error(f"it is a {kind}, not one of {', '.join(FAMILY)}; use type='hf'.")
        return getattr(transformers, FAMILY[kind]).from_pretrained(self._name, **options)

    def fingerprint(self) -> str:
        """See `HFTextEncoder.fingerprint`."""
        return super().fingerprint() + ("-int8" if self.int8 else "")

    def _load(self) -> Any:
        model = super()._load()
        if self.int8:  # not fp8: transformers casts what it multiplies to any dtype of a weight but this
            quantise_linears(model, "int8")
        if self.fast:
            compile_blocks_of(model, varying_sizes=self.padding == "longest")
        return model


def _processes_of_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))


def compile_blocks_of(model: Any, *, varying_sizes: bool, backend: str = "inductor") -> None:
    """Compile the forward of each block. Not `module.compile`, which would take FSDP's hooks into the program."""
    for block in model.encoder.block:
        block.forward = torch.compile(block.forward, dynamic=True if varying_sizes else None, backend=backend)
