"""What all tests share: no network, one thread per process, scripts and groups of processes that cannot hang."""

import os

# Before anything imports torch or transformers: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import multiprocessing
import re
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed
import torch.multiprocessing

ROOT = Path(__file__).resolve().parent.parent
SPAWN_TIMEOUT_S = 120
SLOW_CPU_S = 1.5
TOY_STDIT = {"hidden_size": 32, "depth": 2, "num_heads": 2}
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "opensora.models"]
"""Imported once, by the server that groups of processes are forked from: in each of them it takes 9 s of a CPU."""

torch.set_num_threads(1)


class Finished(NamedTuple):
    """How a script ended."""

    code: int
    stdout: str
    stderr: str


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is not marked `slow` takes at most SLOW_CPU_S, its child processes included.

    It warns of one that takes more, and where CI is set fails one that takes ten times as much: a busy machine and what PyTorch
    sets up at its first use were seen to cost four times as much, and no test may fail for them. Imports are not counted.
    """
    modules, begin = len(sys.modules), os.times()
    result = yield
    used = sum(os.times()[:4]) - sum(begin[:4])
    if used > SLOW_CPU_S and not item.get_closest_marker("slow") and len(sys.modules) - modules < 20:
        text = f"{used:.1f} CPU seconds: make it smaller than {SLOW_CPU_S}, or mark it `slow`."
        if used > 10 * SLOW_CPU_S and os.environ.get("CI"):
            pytest.fail(text)
        item.warn(pytest.PytestWarning(text))
    return result


@pytest.fixture(autouse=True)
def _leaves_no_group() -> Iterator[None]:
    """A process that a later test forks would wait in a group of an earlier one, for threads that it does not have."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def clips_csv(repo_root: Path) -> Path:
    """The table of the clips that the repository ships."""
    return repo_root / "assets" / "clips" / "clips.csv"


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model.safetensors`, of an STDiT of toy size, and `vae/`, both random."""
    from safetensors.torch import save_file

    from opensora.models.stdit.stdit import STDiT
    from opensora.models.vae.vae import VideoAutoencoderKL

    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(0)
    model = STDiT(caption_channels=384, model_max_length=16, **TOY_STDIT)
    # a new STDiT predicts zero: with weights everywhere, the prompt has an effect
    state = {name: 0.1 * torch.randn(w.shape, generator=generator) for name, w in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    architecture = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    VideoAutoencoderKL(architecture=architecture).save_pretrained(folder / "vae")
    return folder


@pytest.fixture
def run_script() -> Callable[..., Finished]:
    """`run_script("scripts/train.py", *args)` runs it from the repository's folder -> (code, stdout, stderr).

    `timeout_s` (default 300) kills it and fails the test. Of several processes: `run_ranks`.
    """

    def run(script: str, *args: object, timeout_s: float = 300) -> Finished:
        argv = [sys.executable, script, *map(str, args)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., str]:
    """`run_ranks("scripts/train.py", *args)` runs it in two gloo processes, as torchrun does but without its start -> what they print.

    Of `times=2` they run it twice, one after the other. What a process raises fails the test.
    """

    def run(script: str, *args: object, processes: int = 2, times: int = 1, timeout_s: float = 300) -> str:
        printed = tmp_path / f"printed-{time.monotonic_ns()}"
        printed.mkdir()
        given = (processes, free_ports(times), script, [str(each) for each in args], printed)
        start_ranks(_run_script, given, processes, script, timeout_s)
        return "".join(path.read_text() for path in sorted(printed.iterdir()))

    return run


def _run_script(rank: int, size: int, ports: list[str], script: str, arguments: list[str], printed: Path) -> None:
    os.environ.update(rank_environment(rank, size))
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    with (printed / str(rank)).open("w") as file, redirect_stdout(file), redirect_stderr(file):
        for port in ports:
            os.environ["MASTER_PORT"] = port
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as exit_:
                if exit_.code:
                    raise RuntimeError((printed / str(rank)).read_text()) from exit_


def rank_environment(rank: int, size: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank, without the port."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
    }
    return {name: str(value) for name, value in variables.items()}


def free_ports(count: int) -> list[str]:
    """Ports that nobody listens to."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor does all but write code: what it would write it for is run as it is, which takes no C++ compiler."""
    import torch._inductor.compile_fx as module
    from torch._functorch.aot_autograd import make_boxed_func

    def run(graph: torch.fx.GraphModule, *_: object, **settings: object) -> Callable[..., list]:
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(module, "compile_fx", partial(module.compile_fx, inner_compile=run))


@pytest.fixture
def spawn() -> Callable[..., None]:
    """`spawn(fn, world_size, tmp_path)` calls `fn(rank, world_size, tmp_path)` in gloo processes of one group.

    `fn` is a function at the top of a test module. An assertion that fails in a process fails the test.
    """
    return spawn_gloo


def spawn_gloo(
    fn: Callable[[int, int, Path], None], world_size: int, tmp_path: Path, timeout_s: float = SPAWN_TIMEOUT_S
) -> None:
    """Run `fn` on `world_size` gloo ranks; raise what a rank raises, or TimeoutError after `timeout_s`."""
    rendezvous = tmp_path / f"rendezvous-{time.monotonic_ns()}"
    start_ranks(_run_rank, (fn, world_size, tmp_path, rendezvous.as_uri()), world_size, fn.__name__, timeout_s)


def start_ranks(target: Callable[..., None], args: tuple, world_size: int, what: str, timeout_s: float) -> None:
    """Call `target(rank, *args)` in `world_size` processes, forked from a server that has imported what takes long.

    Raise what a rank raises, or TimeoutError after `timeout_s`.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        begin_rank, (target, args, dict(os.environ)), nprocs=world_size, join=False, start_method="forkserver"
    )
    join_ranks(context, f"{what} on {world_size} processes", timeout_s)


def join_ranks(context: torch.multiprocessing.ProcessContext, what: str, timeout_s: float) -> None:
    """Wait for processes of torch.multiprocessing. Raise what one raises; after `timeout_s` kill them, and raise TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not context.join(timeout=0.2):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{what} took longer than {timeout_s} s")


def begin_rank(rank: int, target: Callable[..., None], args: tuple, environment: dict[str, str]) -> None:
    """In a process of the fork server: call `target(rank, *args)` in the environment of the process that asked for it."""
    os.environ.clear()  # the server's, from when it began
    os.environ.update(environment)
    torch.set_num_threads(1)
    target(rank, *args)


def _run_rank(
    rank: int, fn: Callable[[int, int, Path], None], world_size: int, tmp_path: Path, init_method: str
) -> None:
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        fn(rank, world_size, tmp_path)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def forget_own_parts():
    """Names that a test registers are unknown to the tests that follow in its process."""
    from opensora.registry import REGISTRIES  # here, as conftest sets what must be set before such imports

    before = {registry: set(registry.choices()) for registry in REGISTRIES.values()}
    yield
    for registry, names in before.items():
        for name in set(registry.module_dict) - names:
            del registry.module_dict[name]
    for name in [name for name in sys.modules if re.match(r"own_|\w+_[0-9a-f]{8}$", name)]:  # opensora/utils/imports.py
        del sys.modules[name]
