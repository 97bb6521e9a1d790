"""Sample videos: `python scripts/inference.py CONFIG [--ckpt-path W] [--prompt "..."]`, or the same under torchrun.

Processes of torchrun share the prompts among them, or with `--sp-size` and `--cfg-parallel` the work on each video; each
video is what a single process would make. docs/how-to/inference.md describes prompts, references, sizes, memory and speed.

Frame rates: `fps` conditions the model; the file gets `save_fps`, or else `fps / frame_interval`, as an exact
fraction. Names: see `opensora.inference.output.sample_file_name`; numbers count from the start of the prompt list,
so a run with `start_index=100` begins with `sample_0100`. A sample that is already there with the same settings is not
made again, one with other settings is an error, and nothing is overwritten: an interrupted run continues when repeated.
"""

from collections.abc import Sequence

from tqdm import tqdm  # its `write` goes above a bar

from opensora.acceleration.cfg_parallel import ParallelPlan, make_parallel_plan
from opensora.acceleration.distributed import init_world, shutdown
from opensora.config.load import InferenceConfig, parse_config
from opensora.inference.build import COMPONENTS
from opensora.inference.jobs import Job, batches, jobs, records, request_of
from opensora.inference.manifest import already_made, write_samples
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.references import sources_of
from opensora.inference.sizes import VideoSize, stated_size, warn_of_conditioning_frames
from opensora.utils.errors import exit_on_user_error
from opensora.utils.folders import make_writable
from opensora.utils.logging import progress_bar, show_messages


@exit_on_user_error
def main() -> None:
    """Read config and prompts, then make every sample that is not there yet."""
    cfg = parse_config(InferenceConfig, COMPONENTS)
    if cfg.verbose > 0:
        show_messages()
    world = init_world(cfg.device)
    try:
        sample(cfg, make_parallel_plan(world, cfg.sp_size, cfg_parallel=cfg.cfg_parallel))
    finally:
        shutdown()


def sample(cfg: InferenceConfig, plan: ParallelPlan) -> None:
    """The samples of this process's team."""
    mine = jobs(cfg)[plan.dp_rank :: plan.dp_size]  # before anything is made: every team must split the same list
    if not mine:
        return
    pipeline, size = None, stated_size(cfg)
    if size is None:  # by name: only the VAE knows
        pipeline = VideoPipeline.from_config(cfg, plan=plan)
        size = pipeline.defaults
    todo = plan.broadcast_from_rank0(lambda: not_done(cfg, mine, size))
    if not todo:
        return
    make_writable(cfg.save_dir, "save_dir")
    if any(sources_of(cfg, job.item) for job in todo):
        warn_of_conditioning_frames(cfg.model.get("from_pretrained"), cfg.model["type"])
    pipeline = pipeline or VideoPipeline.from_config(cfg, plan=plan)
    shows = cfg.verbose > 0 and plan.is_leader
    for batch in progress_bar(
        batches(todo, cfg.batch_size), desc="videos", unit="batch", leave=True, disable=not shows or plan.dp_rank > 0
    ):
        if cfg.verbose > 1 and plan.is_leader:
            tqdm.write("\n".join(job.item.text for job in batch))
        made = pipeline.sample(
            request_of(cfg, batch, pipeline),
            progress=shows and plan.dp_rank == 0,
            decode=plan.is_leader,
        )
        if made.video is None:
            continue
        paths = write_samples(
            list(made.video),
            [job.path for job in batch],
            list(records(cfg, batch, size)),
            device=pipeline.device,
            save_format=cfg.save_format,
        )
        if shows:
            tqdm.write("\n".join(map(str, paths)))


def not_done(cfg: InferenceConfig, mine: Sequence[Job], size: VideoSize) -> list[Job]:
    """The jobs whose samples no earlier run has made; the others are printed."""
    todo = []
    for job, record in zip(mine, records(cfg, mine, size), strict=True):
        if not already_made(job.path, record):
            todo.append(job)
        elif cfg.verbose > 0:
            print(f"{job.path}: already made with these settings, skipped")
    return todo


if __name__ == "__main__":
    main()
