"""Parts of Triton kernels for attention, with a head's channels as one tile or two.

Tiles are powers of two, so that a head of 72 channels is 128 wide in one tile, and 64 + 16 in two: five eighths of the work of the
tensor cores. x0 are channels 0 ... D0 - 1 and x1 those from D0 on; with D1 = 0 there are no others, and x1 is not used.
"""

import triton
import triton.language as tl


def tiles(d: int) -> dict[str, int]:
    """Channels as two powers of two, the second possibly 0; tensor cores take no fewer than 16."""
    whole = max(16, triton.next_power_of_2(d))
    first = max(16, whole // 2)
    second = max(16, triton.next_power_of_2(max(d - first, 1)))
    return {"D0": whole, "D1": 0} if d <= first or first + second >= whole else {"D0": first, "D1": second}


def one_tile(d: int) -> dict[str, int]:
    """Channels as one power of two."""
    return {"D0": max(16, triton.next_power_of_2(d)), "D1": 0}


@triton.jit
def _tile(ptr, rows, stride, inside, first: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to channels of some rows, and which of them there are."""
    channels = first + tl.arange(0, WIDTH)
    return ptr + rows[:, None] * stride + channels[None, :], inside[:, None] & (channels < d)[None, :]


@triton.jit
def load_rows(ptr, rows, stride, inside, d: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some rows, 0 outside."""
    where, there = _tile(ptr, rows, stride, inside, 0, d, D0)
    x0 = tl.load(where, mask=there, other=0.0)
    x1 = x0
    if D1 > 0:
        where, there = _tile(ptr, rows, stride, inside, D0, d, D1)
        x1 = tl.load(where, mask=there, other=0.0)
    return x0, x1


@triton.jit
def store_rows(ptr, rows, stride, inside, x0, x1, d: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    where, there = _tile(ptr, rows, stride, inside, 0, d, D0)
    tl.store(where, x0.to(ptr.dtype.element_ty), mask=there)
    if D1 > 0:
        where, there = _tile(ptr, rows, stride, inside, D0, d, D1)
        tl.store(where, x1.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def store_sum(ptr, x0, x1, d: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all rows."""
    channels = tl.arange(0, D0)
    tl.store(ptr + channels, tl.sum(x0, 0), mask=channels < d)
    if D1 > 0:
        channels = D0 + tl.arange(0, D1)
        tl.store(ptr + channels, tl.sum(x1, 0), mask=channels < d)


@triton.jit
def zeros(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):  # type: ignore[no-untyped-def]
    x0 = tl.zeros([ROWS, D0], tl.float32)
    x1 = x0
    if D1 > 0:
        x1 = tl.zeros([ROWS, D1], tl.float32)
    return x0, x1


@triton.jit
def inner(a0, a1, b0, b1, D1: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b^T."""
    product = tl.dot(a0, tl.trans(b0), input_precision="ieee")
    if D1 > 0:
        product += tl.dot(a1, tl.trans(b1), input_precision="ieee")
    return product


@triton.jit
def add_product(x0, x1, p, a0, a1, D1: tl.constexpr):  # type: ignore[no-untyped-def]
    """x + p a."""
    x0 += tl.dot(p, a0, input_precision="ieee")
    if D1 > 0:
        x1 += tl.dot(p, a1, input_precision="ieee")
    else:
        x1 = x0
    return x0, x1
