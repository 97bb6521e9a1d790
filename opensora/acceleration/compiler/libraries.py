"""The C++ libraries that inductor built for a CPU, in one file beside PyTorch's mega-cache, which leaves them out.

Without them a process that has loaded the mega-cache knows what to build and still calls the compiler for each kernel, and for
each kind of vector instruction to see whether the processor has it. A library is found by a name that depends on its source
and on the compiler's whole command line, so that one which does not fit is never taken. Instructions are those of the
processor that built it; the caller compares processors.
"""

import io
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = ".load_ok"  # beside a library that tries vector instructions: this processor has them
NAME = re.compile(r"[a-z2-7]{2}/[a-z2-7]+(\.\w+)?\.so(\.load_ok)?")


def pack() -> bytes:
    """A zip file of the libraries that this process has loaded or built; b"" where there are none."""
    files = _used()
    if not files:
        return b""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(files.items()):
            archive.write(file, name)
    return buffer.getvalue()


def unpack(data: bytes) -> int:
    """Put libraries where inductor looks for them, and leave what is there; returns how many names were in the file.

    Raises:
        ValueError: a name is none that `pack` writes.
    """
    if not data:
        return 0
    root = _cache()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        for name in names:
            if NAME.fullmatch(name) is None:
                raise ValueError(f"{name} is no library of inductor's")
            target = root / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}.{os.getpid()}")
                temporary.write_bytes(archive.read(name))
                temporary.rename(target)  # another process never sees half of it
    return len(names)


def processor() -> str:
    """The CPU for which libraries are built: its name and its instructions."""
    return "; ".join(cpu_info("model name", "flags", "Features"))


def cpu_info(*names: str) -> list[str]:
    """The different values of some entries of Linux' /proc/cpuinfo; elsewhere none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith(names)))


def _cache() -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())


def _used() -> dict[str, Path]:
    """Libraries with kernels of this process, and those that tried the processor; by the name that a cache has them under."""
    from torch._inductor import codecache

    kinds: list[Any] = [codecache.CppCodeCache, *codecache.CppCodeCache.__subclasses__()]
    kinds += [below for kind in kinds[1:] for below in kind.__subclasses__()]
    files = {file for kind in kinds for load in list(kind.cache.values()) if (file := _file(load)) is not None}
    # a kernel is loaded once a process, so that its file is where the cache was at that time
    tried = {
        file for root in {_cache(), *(file.parent.parent for file in files)} for file in root.glob(f"??/*{MARKER}")
    }
    files |= tried | {file.with_name(file.name.removesuffix(MARKER)) for file in tried}
    return {f"{file.parent.name}/{file.name}": file for file in files if file.is_file()}


def _file(load: Callable[[], Any]) -> Path | None:
    """Where a library of inductor's table was loaded from; None for one that could not be built."""
    try:
        library = load()
    except (OSError, ImportError, RuntimeError):
        return None
    return Path(getattr(library, "__file__", None) or library._name)
