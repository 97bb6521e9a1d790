"""LayerNorm modules of any model exchanged for apex's fused ones, with their weights."""

from torch import nn


def fuse_layer_norms(model: nn.Module) -> int | None:
    """Exchange every `nn.LayerNorm` inside `model`; returns how many, or None where apex is not installed.

    Subclasses are left alone: they do something else. (Optix made new modules with new weights.)
    """
    try:
        from apex.normalization import FusedLayerNorm
    except ImportError:
        return None
    count = 0
    for parent in model.modules():
        for name, norm in parent.named_children():
            if type(norm) is not nn.LayerNorm:
                continue
            fused = FusedLayerNorm(norm.normalized_shape, eps=norm.eps, elementwise_affine=norm.elementwise_affine)
            fused.weight, fused.bias = norm.weight, norm.bias
            setattr(parent, name, fused)
            count += 1
    return count
