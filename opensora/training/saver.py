"""Saves a run's checkpoints while training continues, from all processes at once.

`Saver.save` copies what this process has to write into host memory, which is all that the loop waits for, and a thread writes
the copy (`opensora.checkpoint.save`). It must be a copy: the next optimizer step changes weights in place. The thread
makes no collective call; an error of one process is raised in all by the next `save` or `wait`.
"""

import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
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
"""In which a file that one process makes is there for all; network file systems cache for a minute that there is none."""

States = Mapping[str, Mapping[str, Tensor]]
Shards = dict[str, dict[str, Shard]]


def open_run(cfg: LoopConfig, world: World, model: str) -> tuple[Path, "Saver"]:
    """The run's folder, and the saver of its checkpoints there; to be called by all processes.

    With `load="latest"` it is the folder of the run `exp_name`, if that is there; else a new one, and a UserError where its
    name is taken. `model` is a name for the folder and the manifests.
    """
    config = to_dict(cfg)
    make = partial(make_run_folder, cfg.outputs, cfg.exp_name, model, config, resume=cfg.load == "latest")
    run = broadcast_from_rank0(make)
    return run, Saver(run, world, cfg, {"model": model, "config": config, **environment()})


class Saver:
    """The checkpoints of one run; made, and called, by all its processes alike.

    Args:
        run: the run's folder, on a file system that all processes share.
        cfg: for `ckpt_async`, `keep_last_n` and `keep_every_m`.
        manifest: the content of every manifest, JSON: model, config, commit, versions.

    Raises:
        UserError: a process does not see the folder, or cannot write there; in all processes.
    """

    def __init__(self, run: Path, world: World, cfg: LoopConfig, manifest: Mapping[str, Any]) -> None:
        self.run, self.world, self.cfg = run, world, cfg
        config = json.dumps(manifest.get("config"), sort_keys=True, default=str)
        self.manifest = {**manifest, "config_hash": hashlib.sha256(config.encode()).hexdigest()[:16]}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}  # (part, name) -> host memory, kept for the next copy
        # the others may have to wait for a slow disk longer than a step may take
        self._group = host_group(world, timedelta(seconds=2 * TIMEOUT_S))
        broadcast_from_rank0(partial(clear_leftovers, run))
        self._token = broadcast_from_rank0(partial(secrets.token_hex, 4))
        if (
            self._group is not None
        ):  # else the first checkpoint would be lost, after hours, as its files are not in one folder
            mark = run / f".shared-{self._token}"
            broadcast_from_rank0(mark.touch)
            error = self._first_error(None if world.is_main else _error_next_to(mark, world.rank))
            if world.is_main:
                mark.unlink()
            if error:
                raise UserError(f"{error}: outputs={cfg.outputs} must be a folder that all processes share.")

    def save(self, state: RunState, parts: States) -> None:
        """Begin to write `run/epoch{E}-global_step{S}`; with `ckpt_async=False` it is complete on return.

        So it is where the checkpoint before could not be written, as that may have had a cause that is over.

        Args:
            state: where the run stands.
            parts: name -> tensors, plain or DTensors, as each process has them.

        Raises:
            UserError: this checkpoint could not be written at once; in all processes.
        """
        begin, at_once = time.monotonic(), not self.cfg.ckpt_async
        try:
            self.wait()
        except UserError as error:
            at_once = True
            logger.error("%s; training waits for the next one.", error)
        if (waited := time.monotonic() - begin) > 1:
            logger.warning("waited %.1f s for the checkpoint before; save less often, or to a faster disk.", waited)
        own: Shards = {}
        for part, tensors in parts.items():
            shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
            own[part] = {name: s for name, s in shards.items() if s.writes and (s.local.numel() or 0 in s.shape)}
        writing = Writing(self.run / state.folder_name, f"{self._token}-{state.step}", self.world.rank, self.world.size)
        if at_once:
            self._write(writing, own, asdict(state), lambda: None)
            self.wait()
        else:
            copies, copied = self._copy_to_host(own)
            arguments = (writing, copies, asdict(state), copied)
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint writer")
            self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is complete.

        Raises:
            UserError: it could not be written; in all processes.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if message := self._first_error(None if error is None else f"{error}"):
            raise UserError(f"a checkpoint could not be written to {self.run}: {message}") from error

    def _copy_to_host(self, parts: Shards) -> tuple[Shards, Callable[[], None]]:
        """The same shards as copies in host memory, and a function that waits until all are made."""
        pin = self.world.device.type == "cuda"  # page-locked memory, into which a GPU copies while the host continues
        before, self._buffers = self._buffers, {}
        copies: Shards = {part: {} for part in parts}
        threads = torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # several wait for each other after each tensor: long, where there are fewer free cores
        try:
            for part, shards in parts.items():
                for name, shard in shards.items():
                    buffer = before.pop((part, name), None)
                    if buffer is None or buffer.shape != shard.local.shape or buffer.dtype != shard.local.dtype:
                        buffer = torch.empty(shard.local.shape, dtype=shard.local.dtype, pin_memory=pin)
                    buffer.copy_(shard.local, non_blocking=True)
                    self._buffers[part, name] = buffer
                    copies[part][name] = shard._replace(local=buffer)
        finally:
            torch.set_num_threads(threads)
        if not pin:
            return copies, lambda: None
        copied = torch.cuda.Event()
        copied.record()  # the next optimizer step is queued behind the copies, so it cannot change what they read
        return copies, copied.synchronize

    def _write(self, writing: Writing, own: Shards, state: dict[str, Any], copied: Callable[[], None]) -> None:
        """All of the writing; what it raises is kept for `wait`."""
        begin = time.monotonic()
        manifest = {"step": state["step"], "data": state["data"], **self.manifest}
        try:
            copied()
            writing.write_own(own, file_header(manifest))
            if writing.rank == 0:
                path = writing.commit(state, manifest)
                keep = {"keep_last_n": self.cfg.keep_last_n, "keep_every_m": self.cfg.keep_every_m}
                removed = len(remove_old(self.run, **keep, token=writing.token))
                seconds = time.monotonic() - begin
                logger.info("saved %s in %.1f s%s", path, seconds, f", removed {removed} older" if removed else "")
        except Exception as error:  # noqa: BLE001  (raised by `wait`, in the loop's thread)
            self._error = error
            if self.cfg.ckpt_async:  # `wait` comes perhaps an hour later
                logger.error("%s could not be written: %s", writing.path, error)
            if writing.rank == 0:
                writing.discard()

    def _first_error(self, own: str | None) -> str | None:
        """The first process' error, the same in all; None = there is none."""
        if self._group is None:
            return own
        errors: list[str | None] = [None] * self.world.size
        dist.all_gather_object(errors, own, group=self._group)
        return next((error for error in errors if error is not None), None)


def _error_next_to(mark: Path, rank: int) -> str | None:
    """Why this process cannot write next to a file that another one has made; None = it can."""
    process, end = f"process {rank} on {socket.gethostname()}", time.monotonic() + SEEN_S
    try:
        while not mark.exists():
            if time.monotonic() > end:
                return f"{process} does not see {mark.parent}"
            time.sleep(0.1)
        own = mark.with_name(f"{mark.name}-{rank}")
        own.touch()
        own.unlink()
    except OSError as error:
        return f"{process} cannot write to {mark.parent} ({error})"
    return None
