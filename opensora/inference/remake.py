"""Make a sample again from its sidecar, bit for bit.

The whole batch that it was made in is sampled, since a matrix product may sum in another order for another number of rows.
What cannot be put back is told: other hardware or versions, weights that have changed, several processes that shared the work.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora.config.load import InferenceConfig, config_from_dict
from opensora.inference.build import COMPONENTS
from opensora.inference.jobs import Job, request_of
from opensora.inference.manifest import OF_A_BATCH, describe_checkpoint, hardware
from opensora.inference.manifest_inputs import inputs_of
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import PromptItem, load_items
from opensora.utils.environment import environment
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

# what is of the run that made it: which of its samples, and how the work was shared out
ONE_PROCESS = {
    "prompt_path": None,
    "start_index": None,
    "end_index": None,
    "num_sample": 1,
    "sp_size": 1,
    "cfg_parallel": False,
}


def remake(record: Mapping[str, Any], device: torch.device | str | None = None) -> Tensor:
    """The video [3, T, H, W] in [-1, 1] of a sidecar's sample, fp32, on the CPU.

    Args:
        record: what `manifest.read_sidecar` gives.
        device: where to sample; None: as the sidecar's config says.

    Raises:
        UserError: the sidecar does not name its batch, or a part or a reference is no longer there.
    """
    if "batch" not in record:
        raise UserError("the sidecar does not name the batch of its sample: an older version wrote it.")
    cfg = config_from_dict(
        InferenceConfig, {**record["config"], **ONE_PROCESS, "prompt": [record["prompt"]]}, COMPONENTS
    )
    pipeline = VideoPipeline.from_config(cfg, device)
    for difference in differences(record, pipeline.device):
        logger.warning("%s; the bits may differ.", difference)
    batch = [Job(item_of(cfg, entry), entry["sample_index"], Path()) for entry in record["batch"]]
    video = pipeline.sample(request_of(cfg, batch, pipeline)).video
    assert video is not None, "decoding is asked for"
    return video[record["place"]]


def item_of(cfg: InferenceConfig, entry: Mapping[str, Any]) -> PromptItem:
    """The prompt of an entry of a sidecar's `batch`, with the index and the seed that it had."""
    own = {name: entry[name] for name in OF_A_BATCH if name != "seed"}
    (item,) = load_items(dataclasses.replace(cfg, prompt=[entry["prompt"]], **own))
    return dataclasses.replace(item, index=entry["prompt_index"], overrides={"seed": entry["seed"]})


def differences(record: Mapping[str, Any], device: torch.device | str) -> list[str]:
    """What is not as it was when the sample was made, as far as a sidecar tells."""
    config, versions = record["config"], environment()["versions"]
    inputs: Mapping[str, Any] = record.get("inputs", {})  # older sidecars have none
    now_in = inputs_of(config, list(inputs.get("references", ())))
    pairs = {
        "hardware": (record.get("hardware"), hardware(device)),
        "checkpoint": (record["checkpoint"], describe_checkpoint(config["model"].get("from_pretrained"))),
        **{name: (was, now_in[kind].get(name)) for kind, entries in inputs.items() for name, was in entries.items()},
        **{name: (was, versions.get(name)) for name, was in record.get("versions", {}).items()},
        **{name: (config[name], now) for name, now in (("sp_size", 1), ("cfg_parallel", False)) if name in config},
    }
    return [f"{name} was {was}, now {now}" for name, (was, now) in pairs.items() if was != now]
