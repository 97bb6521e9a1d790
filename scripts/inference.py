"""Sample videos: `python scripts/inference.py CONFIG [--ckpt-path W] [--prompt "..."]`, or the same under torchrun.

Processes of torchrun share the prompts among them; each makes the videos that a single process would.

Frame rates: `fps` is what the model is told; the file gets `save_fps`, or else `fps / frame_interval`, as an exact
fraction. Names: see `opensora.inference.output.sample_file_name`; numbers count from the start of the prompt list,
so a run with `start_index=100` begins with `sample_0100`. A sample that is already there with the same settings is not
made again, one with other settings is an error, and nothing is overwritten: an interrupted run continues when repeated.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.inference.output import (
    already_made,
    describe_checkpoint,
    sample_file_name,
    save_sample,
    sidecar,
    write_sidecar,
)
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import load_prompts
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.config import InferenceConfig, parse_config, to_dict
from opensora.utils.errors import exit_on_user_error
from opensora.utils.logging import show_messages
from opensora.utils.run import environment

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS}


class Job(NamedTuple):
    """One sample to make."""

    path: Path  # without extension
    sidecar: dict[str, Any]


@exit_on_user_error
def main() -> None:
    """Read config and prompts, then make every sample that is not there yet."""
    cfg = parse_config(InferenceConfig, COMPONENTS)
    world = init_world(cfg.device)
    if world.is_main and cfg.verbose > 0:
        show_messages()
    try:
        sample(cfg, world)
    finally:
        shutdown()


def sample(cfg: InferenceConfig, world: World) -> None:
    """This process's share of the samples."""
    todo = [job for job in list(jobs(cfg))[world.rank :: world.size] if not is_done(cfg, job)]
    if not todo:
        return
    pipeline = VideoPipeline.from_config(cfg, world.device)
    groups = [[job for job in todo if job.sidecar["sample_index"] == k] for k in range(cfg.num_sample)]
    batches = [g[i : i + cfg.batch_size] for g in groups for i in range(0, len(g), cfg.batch_size)]
    for batch in tqdm(batches, unit="batch", disable=cfg.verbose < 1 or not world.is_main):
        prompts = [job.sidecar["prompt"] for job in batch]
        if cfg.verbose > 1:
            tqdm.write("\n".join(prompts))
        videos = pipeline(
            prompts,
            num_frames=cfg.num_frames,
            image_size=cfg.image_size,
            fps=cfg.fps,
            seed=cfg.seed,
            prompt_indices=[job.sidecar["prompt_index"] for job in batch],
            sample_index=batch[0].sidecar["sample_index"],
            progress=cfg.verbose > 1 and world.is_main,
        )
        for job, video in zip(batch, videos, strict=True):
            write_sidecar(job.sidecar, job.path)  # first: a video without one is taken for another program's
            path = save_sample(video, job.path, save_fps(cfg))
            if cfg.verbose > 0:
                tqdm.write(str(path))


def jobs(cfg: InferenceConfig) -> Iterator[Job]:
    """Every sample that the config asks for."""
    prompts = load_prompts(cfg.prompt, cfg.prompt_path, cfg.start_index, cfg.end_index)
    checkpoint = describe_checkpoint(cfg.model.get("from_pretrained"))
    config, made_with = to_dict(cfg), environment()
    for k in range(cfg.num_sample):
        for index, prompt in enumerate(prompts, start=cfg.start_index or 0):
            name = sample_file_name(
                prompt,
                index,
                k,
                num_sample=cfg.num_sample,
                sample_name=cfg.sample_name,
                prompt_as_path=cfg.prompt_as_path,
            )
            record = sidecar(
                config,
                prompt=prompt,
                prompt_index=index,
                sample_index=k,
                save_fps=save_fps(cfg),
                checkpoint=checkpoint,
                made_with=made_with,
            )
            yield Job(Path(cfg.save_dir) / name, record)


def is_done(cfg: InferenceConfig, job: Job) -> bool:
    """Whether an earlier run made this sample; says so."""
    done = already_made(job.path, job.sidecar)
    if done and cfg.verbose > 0:
        print(f"{job.path}: already made with these settings, skipped")
    return done


def save_fps(cfg: InferenceConfig) -> float:
    """The frame rate of the files."""
    return cfg.fps / cfg.frame_interval if cfg.save_fps is None else cfg.save_fps


if __name__ == "__main__":
    main()
