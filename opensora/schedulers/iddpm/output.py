"""What an IDDPM denoiser returns: a prediction, and beside it the variance where that is learned."""

from typing import NamedTuple

from torch import Tensor

from opensora.schedulers.iddpm.options import LEARNED
from opensora.utils.errors import UserError


class Output(NamedTuple):
    """`prediction` [B, C, T, H, W], and `variance` alike when it is learned."""

    prediction: Tensor
    variance: Tensor | None


def split_output(output: Tensor, num_channels: int, variance: str) -> Output:
    """Split [B, C or 2C, T, H, W].

    Raises:
        UserError: the number of channels is not what `variance` asks for.
    """
    expected = 2 * num_channels if variance in LEARNED else num_channels
    if output.shape[1] != expected:
        raise UserError(_channel_message(variance, num_channels, output.shape[1]))
    return Output(*output.chunk(2, dim=1)) if variance in LEARNED else Output(output, None)


def _channel_message(variance: str, num_channels: int, num_returned: int) -> str:
    start = (
        f"scheduler.variance={variance!r}, but the model returned {num_returned} channels for {num_channels}-channel"
    )
    if variance in LEARNED:
        return (
            f"{start} latents instead of {2 * num_channels}: set model.pred_sigma=True, or scheduler.variance to "
            "'fixed_small' or 'fixed_large'."
        )
    return (
        f"{start} latents instead of {num_channels}: set model.pred_sigma=False, or scheduler.variance='learned_range'."
    )
