"""Which of the T training timesteps a sampler visits (Nichol & Dhariwal 2021, section 4; Song et al. 2021 for ddimN)."""

from itertools import accumulate, repeat

from opensora.utils.errors import UserError


def spaced_timesteps(diffusion_steps: int, respacing: str | None) -> list[int]:
    """The visited timesteps, ascending.

    Args:
        respacing: None or "" visits all; "N" visits N, first and last included; "a,b,c" cuts [0, T) in three equal
            sections and visits a, b and c timesteps in them; "ddimN" visits 0, s, 2s, ... for an integer stride s.
    """
    if not respacing:
        return list(range(diffusion_steps))
    if respacing.startswith("ddim"):
        timesteps = _integer_stride(diffusion_steps, _positive(respacing.removeprefix("ddim"), respacing))
    else:
        sections = [_positive(part, respacing) for part in respacing.split(",")]
        timesteps = _sections(diffusion_steps, sections, respacing)
    if timesteps == [0] and diffusion_steps > 1:
        raise UserError(
            f"num_sampling_steps / timestep_respacing {respacing!r} keeps timestep 0 only, where the input is almost "
            "clean: sampling from noise needs at least 2 steps."
        )
    return timesteps


def _positive(text: str, respacing: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise UserError(
            f"num_sampling_steps / timestep_respacing {respacing!r}: {text!r} is not a positive integer. "
            "Write 'N', 'a,b,c' or 'ddimN'."
        )
    return int(text)


def _integer_stride(diffusion_steps: int, num_steps: int) -> list[int]:
    by_length = {len(range(0, diffusion_steps, s)): s for s in range(diffusion_steps, 0, -1)}  # the smallest stride
    if num_steps in by_length:
        return list(range(0, diffusion_steps, by_length[num_steps]))
    nearby = sorted(sorted(by_length, key=lambda n: abs(n - num_steps))[:4])
    raise UserError(
        f"timestep_respacing 'ddim{num_steps}': no integer stride visits exactly {num_steps} of {diffusion_steps} "
        f"timesteps. Nearby counts that work: {', '.join(f'ddim{n}' for n in nearby)}; or '{num_steps}', whose "
        "stride is fractional."
    )


def _sections(diffusion_steps: int, counts: list[int], respacing: str) -> list[int]:
    size, num_longer = divmod(diffusion_steps, len(counts))
    timesteps: list[int] = []
    start = 0
    for i, count in enumerate(counts):
        length = size + (i < num_longer)
        if count > length:
            raise UserError(
                f"num_sampling_steps / timestep_respacing {respacing!r} asks for {count} of the {length} timesteps "
                f"of section {i + 1} (diffusion_steps={diffusion_steps}); lower it to at most {length}."
            )
        stride = (length - 1) / max(count - 1, 1)
        # a running sum, not i * stride: the two round differently at halves, and OpenAI's code sums
        timesteps += [start + round(x) for x in accumulate(repeat(stride, count - 1), initial=0.0)]
        start += length
    return timesteps
