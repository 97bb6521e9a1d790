"""Saves a run's checkpoints while training goes on, from all processes at once.

    run, saver = open_run(cfg, world, "STDiT-XL/2")
    saver.save(state, {"model": engine.model_state(), "ema": ema.state_dict(), "optimizer": engine.optimizer_state()})
    saver.wait()                                  # at the end of the run

`save` copies what this process has to write into host memory, which is all that the loop waits for, and a thread writes
the copy (`opensora.checkpoint.save`). It must be a copy: the next optimizer step changes weights in place. The thread
makes no collective call; what went wrong in one process is told to all by the next `save` or `wait`.
"""

import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import World, broadcast_from_rank0, host_group
from opensora.checkpoint.load import file_header
from opensora.checkpoint.rotation import clear_leftovers, remove_old
from opensora.checkpoint.save import TIMEOUT_S, Writing
from opensora.checkpoint.tensors import Shard, shard_of
from opensora.config.load import to_dict
from opensora.config.schema import LoopConfig
from opensora.training.run import RunState, make_run_folder
from opensora.utils.environment import environment
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

SEEN_S = 120.0
"""In which a file that one process makes is there for all; network file systems remember for a minute that there is none."""

Parts = Mapping[str, Mapping[str, Tensor]]
Shards = dict[str, dict[str, Shard]]


def open_run(cfg: LoopConfig, world: World, model: str) -> tuple[Path, "Saver"]:
    """The run's folder, and what saves its checkpoints there; to be called by all processes.

    With `load="latest"` it is the folder of the run `exp_name`, if that is there; else a new one.

    Args:
        model: the name of what is trained, for the folder and the manifests.

    Raises:
        UserError: a run of that name is there already.
    """
    config = to_dict(cfg)
    make = partial(make_run_folder, cfg.outputs, cfg.exp_name, model, config, go_on=cfg.load == "latest")
    run = broadcast_from_rank0(make)
    return run, Saver(run, world, cfg, {"model": model, "config": config, **environment()})


class Saver:
    """The checkpoints of one run; made, and called, by all its processes alike.

    Args:
        run: the run's folder, on a file system that all processes share.
        world: this process and the others.
        cfg: `ckpt_async`, `keep_last_n` and `keep_every_m`.
        manifest: what goes into every manifest, JSON: model, config, commit, versions.

    Raises:
        UserError: a process does not see the folder, or cannot write there; in all processes.
    """

    def __init__(self, run: Path, world: World, cfg: LoopConfig, manifest: Mapping[str, Any]) -> None:
        self.run, self.world, self.cfg = run, world, cfg
        self.manifest = {**manifest, "config_hash": config_hash(manifest.get("config"))}
        self._token = broadcast_from_rank0(self._begin)
        self._copies = HostCopies(pin=world.device.type == "cuda")
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        # the others may have to wait for a slow disk longer than a step may take
        self._group = host_group(world, timedelta(seconds=2 * TIMEOUT_S))
        if self._group is not None:
            self._refuse_unshared()

    def save(self, state: RunState, parts: Parts) -> None:
        """Begin to write `run/epoch{E}-global_step{S}`; with `ckpt_async=False` it is complete on return.

        So it is where the checkpoint before could not be written, as that may have had a cause that is over.

        Args:
            state: where the run stands.
            parts: name -> tensors, plain or DTensors, as each process has them.

        Raises:
            UserError: this checkpoint could not be written at once; in all processes.
        """
        begin, wait_for_it = time.monotonic(), not self.cfg.ckpt_async
        try:
            self.wait()
        except UserError as error:
            wait_for_it = True
            logger.error("%s; the next one is written without going on meanwhile.", error)
        if (waited := time.monotonic() - begin) > 1:
            logger.warning("waited %.1f s for the checkpoint before; save less often, or to a faster disk.", waited)
        own = {part: _own_shards(tensors) for part, tensors in parts.items()}
        copied: Callable[[], None] = _nothing
        if not wait_for_it:
            own, copied = self._copies.take(own)
        writing = Writing(self.run / state.folder_name, f"{self._token}-{state.step}", self.world.rank, self.world.size)
        work = partial(self._write, writing, own, asdict(state), copied)
        if not wait_for_it:
            self._thread = threading.Thread(target=work, name="checkpoint writer")
            self._thread.start()
        else:
            work()
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is complete.

        Raises:
            UserError: it could not be written; in all processes.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if said := self._first_of_all(None if error is None else f"{error}"):
            raise UserError(f"a checkpoint could not be written to {self.run}: {said}") from error

    def _begin(self) -> str:
        """A name for what this process and the others write, in an orderly folder."""
        clear_leftovers(self.run)
        return secrets.token_hex(4)

    def _refuse_unshared(self) -> None:
        """Else the first checkpoint would be found out to be lost, after hours, when its files did not come together."""
        mark = self.run / f".shared-{self._token}"
        broadcast_from_rank0(mark.touch)
        said = self._first_of_all(None if self.world.is_main else _trouble_with(mark, self.world.rank))
        if self.world.is_main:
            mark.unlink()
        if said:
            raise UserError(f"{said}: outputs={self.cfg.outputs} must be a folder that all processes share.")

    def _write(self, writing: Writing, own: Shards, state: dict[str, Any], copied: Callable[[], None]) -> None:
        """All of the writing; what it raises is kept for `wait`."""
        begin = time.monotonic()
        manifest = {"step": state["step"], "data": state["data"], **self.manifest}
        try:
            copied()
            writing.write_own(own, file_header(manifest))
            if writing.rank == 0:
                path = writing.commit(state, manifest)
                gone = self._remove_old(writing.token)
                seconds = time.monotonic() - begin
                logger.info("saved %s in %.1f s%s", path, seconds, f", removed {gone} older" if gone else "")
        except Exception as error:  # noqa: BLE001  (raised by `wait`, in the loop's thread)
            self._error = error
            if self.cfg.ckpt_async:  # `wait` comes perhaps an hour later
                logger.error("%s could not be written: %s", writing.path, error)
            if writing.rank == 0:
                writing.discard()

    def _remove_old(self, token: str) -> int:
        keep = {"keep_last_n": self.cfg.keep_last_n, "keep_every_m": self.cfg.keep_every_m}
        return len(remove_old(self.run, **keep, token=token))

    def _first_of_all(self, said: str | None) -> str | None:
        """What the first process that has something to say says; None = nobody has."""
        if self._group is None:
            return said
        answers: list[str | None] = [None] * self.world.size
        dist.all_gather_object(answers, said, group=self._group)
        return next((answer for answer in answers if answer is not None), None)


def _trouble_with(mark: Path, rank: int) -> str | None:
    """Why this process cannot write beside a file that another one has made; None = it can."""
    who, end = f"process {rank} on {socket.gethostname()}", time.monotonic() + SEEN_S
    try:
        while not mark.exists():
            if time.monotonic() > end:
                return f"{who} does not see {mark.parent}"
            time.sleep(0.1)
        own = mark.with_name(f"{mark.name}-{rank}")
        own.touch()
        own.unlink()
    except OSError as error:
        return f"{who} cannot write to {mark.parent} ({error})"
    return None


class HostCopies:
    """Copies of tensors in host memory; the memory is kept for the next time.

    Args:
        pin: in page-locked memory, into which a GPU copies while the host goes on.
    """

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, parts: Shards) -> tuple[Shards, Callable[[], None]]:
        """The same shards as copies, and a function that waits until all are made."""
        before, self._buffers = self._buffers, {}
        copies: Shards = {part: {} for part in parts}
        with _one_thread():
            for part, shards in parts.items():
                for name, shard in shards.items():
                    buffer = before.pop((part, name), None)
                    if buffer is None or buffer.shape != shard.local.shape or buffer.dtype != shard.local.dtype:
                        buffer = torch.empty(shard.local.shape, dtype=shard.local.dtype, pin_memory=self.pin)
                    buffer.copy_(shard.local, non_blocking=True)
                    self._buffers[part, name] = buffer
                    copies[part][name] = shard._replace(local=buffer)
        if not self.pin:
            return copies, _nothing
        copied = torch.cuda.Event()
        copied.record()  # the next optimizer step is queued behind the copies, so it cannot change what they read
        return copies, copied.synchronize


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several would wait for each other after each tensor: long, where there are fewer free cores than threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def config_hash(config: Any) -> str:
    """A short name for a config: equal for equal ones."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _own_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """What this process has to write of some tensors."""
    shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
    return {name: s for name, s in shards.items() if s.writes and (s.local.numel() or 0 in s.shape)}


def _nothing() -> None:
    """What waits for copies that are made at once."""
