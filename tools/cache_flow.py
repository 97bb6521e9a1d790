"""The optical-flow scores of a cache, for clips that have none in the table or the records.

Part of `tools.cache_features`; the score is that of `tools.scoring`, which is why it is measured here and not in the datasets.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from opensora.config.load import TrainConfig
from opensora.datasets.cache.features import FLOW, FLOW_FEATURES
from opensora.datasets.cache.moments import Counts, Job, write_missing
from opensora.datasets.cache.records_dataset import RecordVideoTextDataset, moments_of
from opensora.datasets.table.table import Table, complain_about_rows, read_table
from opensora.datasets.video.files import is_image
from opensora.registry import DATASETS, MODELS, build_module
from opensora.training.batch_encoder import freeze
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tools.scoring.flow import Flow
from tools.scoring.registry import scorer

RECORDS = RecordVideoTextDataset.__name__
STILL = "Write their cells of the column 'flow' into the table, or train a model without motion tokens (model.motion=False)."


def wants_flow(model: Mapping[str, Any]) -> bool:
    """Whether the model of a config is conditioned on the optical-flow score."""
    if not str(model["type"]).startswith("NOVA"):
        return False
    with torch.device("meta"):
        return "flow" in MODELS.build({**model, "from_pretrained": None}).micro_conditions


def cached_flow(cfg: TrainConfig, dataset: Mapping[str, Any], job: Job, *, asked: bool) -> dict[str, Counts]:
    """Measure the scores that are missing; returns nothing where none is and nobody `asked`.

    Raises:
        UserError: a clip cannot be read, or is an image.
    """
    chosen = scorer("flow")
    assert isinstance(chosen, Flow)
    settings = {key: value for key, value in dataclasses.asdict(chosen).items() if key != "device"}
    if dataset.get("type") == RECORDS:
        return {FLOW: _of_records(cfg, job, chosen, settings)}
    table = read_table(dataset["data_path"], dataset["root"], text_columns=())
    lacking = table.without_flow()
    if not lacking:
        if asked:
            raise UserError(f"{table.source} has the flow of every clip; there is nothing to measure (--what flow).")
        return {}
    return {FLOW: _of_clips(table, lacking, job, chosen, settings)}


def _of_clips(table: Table, lacking: list[int], job: Job, chosen: Flow, settings: dict[str, Any]) -> Counts:
    rows: dict[str, int] = {}
    for row in lacking:
        rows.setdefault(table.name(row), row)
    if still := [row for row in rows.values() if is_image(table.path(row))]:
        raise complain_about_rows(table, still, "are images, in which nothing moves, and have no flow", STILL)

    def measure(name: str) -> dict[str, float]:
        found = chosen.score([table.path(rows[name])])[0]
        if found["flow"] is None:
            raise UserError(f"{table.where(rows[name])}: {found.get('error') or f'it has a single frame. {STILL}'}")
        return {"flow": float(found["flow"])}

    sources = {name: table.path(row) for name, row in rows.items()}
    return write_missing(job, FLOW, FLOW_FEATURES, settings, measure, sources)


def _of_records(cfg: TrainConfig, job: Job, chosen: Flow, settings: dict[str, Any]) -> Counts:
    """Of records of latents, which the VAE decodes for it."""
    vae = freeze(build_module(cfg.vae, MODELS), job.world.device)
    component = {key: value for key, value in (cfg.dataset or {}).items() if key != "cache_dir"}
    data: Any = build_module(component, DATASETS, seed=cfg.seed, vae_fingerprint=vae.fingerprint())
    if "flow" in data.records.features:
        raise UserError(f"the records of {data.path} have their flow; there is nothing to measure (--what flow).")
    if data.shape[1] == 1:
        raise UserError(f"the records of {data.path} are images, in which nothing moves: set model.motion=False.")

    @torch.inference_mode()
    def measure(key: str) -> dict[str, float]:
        moments = moments_of(data.records[int(key)])[None].to(job.world.device)  # [1, 2C, T, h, w]
        z = vae.sample(moments, generators(0, "flow", ids=[int(key)], device=job.world.device))
        x = vae.decode(z)[0].clamp(-1, 1)  # [3, T, H, W]
        pixels = ((x + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()
        found = chosen.of_frames(list(pixels), data.fps)
        assert found is not None, "two frames or more"
        return {"flow": found}

    settings = {**settings, "vae": vae.fingerprint(), "fps_of_videos": data.fps}
    sources = {str(i): data.content for i in range(len(data))}
    return write_missing(job, FLOW, FLOW_FEATURES, settings, measure, sources)
