"""Low-rank adapters (LoRA, Hu et al. 2021) as files, and their merge into plain weights.

An adapted linear layer computes W x + s (alpha / rank) B A x, with A [rank, in] and B [out, rank]. Adding s (alpha / rank)
B A to W gives a plain layer with the same output, so sampling needs neither an extra product nor a package. Of DoRA (Liu et al.
2024, arXiv:2402.09353) the sum is scaled further: W' = m (W + B A) / ||W + B A||, one norm for each row, or for each column
where m is a row.

Files are those of peft (a folder with `adapter_config.json` and `adapter_model.safetensors`), of diffusers, ComfyUI and kohya (one
file), which differ in the names of layers and factors. Of a checkpoint folder of a run with `lora` the EMA is taken.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from opensora.checkpoint.load import MANIFEST, Checkpoint, latest_checkpoint, open_checkpoint
from opensora.checkpoint.weight_files import kind_of, read_file, refuse_existing
from opensora.config.schema import LoraOptions, is_number
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.folders import read_json

log = logging.getLogger(__name__)

CONFIG_FILE, WEIGHT_FILE = "adapter_config.json", "adapter_model.safetensors"
HEADER = "lora_adapter_metadata"  # where diffusers keeps peft's config in a file
PREFIX = "base_model.model."  # how peft names a wrapped model's layers in its files
FACTOR = re.compile(r"\.lora_[AB]\.")
KEY = re.compile(  # of a file: the layer, and what of it; peft inserts the adapter's name
    r"(.+?)\.(?:(?P<A>(?:lora_A|lora_down|lora\.down)(?:\.\w+)?\.weight)|(?P<B>(?:lora_B|lora_up|lora\.up)(?:\.\w+)?\.weight)|"
    r"(?P<B_bias>lora_B(?:\.\w+)?\.bias)|(?P<m>dora_scale|lora_magnitude_vector(?:\.\w+)*)|(?P<alpha>alpha)|(?P<weight>diff)|"
    r"(?P<bias>diff_b))"
)
WRAPPER = re.compile(
    rf"^(?:{re.escape(PREFIX)})?(?:(?:model\.)?diffusion_model\.|transformer(?:_2)?\.|unet\.|net(?:_2)?\.|lora_unet_|"
    "lora_transformer_|lycoris_)?"
)
SECOND = re.compile(rf"^(?:{re.escape(PREFIX)})?(?:transformer|net)_2\.")
NETWORKS = {"high": "net", "low": "net_2"}  # the experts of a model that has two
COUNTER = "lora_forwards"  # see `opensora.training.lora`
# what peft can do beyond this, by its name in a config; a file that asks for one of these is refused
UNKNOWN_KINDS = (
    "modules_to_save", "layer_replication", "alora_invocation_tokens", "use_qalora", "target_parameters", "fan_in_fan_out",
)  # fmt: skip


class Adapter(NamedTuple):
    """A trained adapter, by the names that its file gives to layers.

    Args:
        factors: of each layer its A [rank, in] and B [out, rank].
        scale: of all products B A, unless a layer has its own in `scales`.
        magnitudes: DoRA's, [out], [out, 1] or [1, in], of the layers that have them.
        differences: what is added to the weight of a layer, or as `LAYER.bias` to its bias.
        expert: which of two networks it is for, "high" or "low"; None = the file does not say.
    """

    factors: dict[str, tuple[Tensor, Tensor]]
    scale: float = 1.0
    scales: Mapping[str, float] = {}
    magnitudes: Mapping[str, Tensor] = {}
    differences: Mapping[str, Tensor] = {}
    expert: str | None = None

    def scale_of(self, layer: str) -> float:
        """Of the layer's product B A."""
        return self.scales.get(layer, self.scale)


def adapter_of(
    state: Mapping[str, Tensor], source: str | Path, config: Mapping[str, Any] | None = None, expert: str | None = None
) -> Adapter:
    """An adapter from the tensors of any of the files above, or of our checkpoints.

    Args:
        config: peft's, for the layers without an alpha of their own; None = alpha is the rank.

    Raises:
        UserError: there is no adapter in it, half of one, or something else too.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in state.items():
        if (match := KEY.fullmatch(name)) and match.lastgroup:
            layers.setdefault(match[1].removeprefix(PREFIX), {})[match.lastgroup] = tensor
        elif name != COUNTER:
            others.append(name)
    if others:
        raise UserError(f"{source} is no LoRA: it also holds {', '.join(sorted(others)[:3])}.")
    whole = ({"A", "B"}, {"weight"}, {"bias"})
    halves = [
        name
        for name, parts in layers.items()
        if ("A" in parts) != ("B" in parts) or not any(one <= parts.keys() for one in whole)
    ]
    if not layers or halves:
        what = f"{len(halves)} layers lack lora_A or lora_B, such as {halves[0]}" if halves else "it holds no lora_A"
        raise UserError(f"{source} is no LoRA: {what}.")
    scale = _scale(config or {}, "", (config or {}).get("r", 1))
    factors, scales, magnitudes = {}, {}, {}
    differences: dict[str, Tensor] = {}
    for name, parts in layers.items():
        differences |= {name + end: parts[kind] for kind, end in (("weight", ""), ("bias", ".bias")) if kind in parts}
        if "A" not in parts:
            continue
        factors[name], rank = (parts["A"], parts["B"]), len(parts["A"])
        own = float(parts["alpha"]) / rank if "alpha" in parts else _scale(config or {}, name, rank)
        if own != scale:
            scales[name] = own
        if "m" in parts:
            magnitudes[name] = parts["m"]
        if "B_bias" in parts:
            differences[f"{name}.bias"] = own * parts["B_bias"].float() + differences.get(f"{name}.bias", 0)
    return Adapter(factors, scale, scales, magnitudes, differences, expert if expert in NETWORKS else None)


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Of a layer's product B A, by peft's config; without one it is 1."""
    name = re.sub(r"^transformer(_2)?\.", "", layer)
    patterns = (config.get("alpha_pattern") or {}).items()
    alpha = next(
        (value for key, value in patterns if re.match(rf"(.*\.)?({key})$", name)), config.get("lora_alpha", rank)
    )
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def checkpoint_adapter(checkpoint: Checkpoint, part: str) -> Adapter:
    """The adapter of a checkpoint of a LoRA run: its "ema" or "model".

    Raises:
        UserError: the run is one without lora.
    """
    config = checkpoint.manifest.get("config") or {}
    if config.get("lora") is None:
        raise UserError(
            f"{checkpoint.path} is a checkpoint of a run without lora: load it with --ckpt-path, or export it with tools.export_weights."
        )
    lora, expert = LoraOptions.of(config["lora"]), (config.get("model") or {}).get("expert")
    return adapter_of(checkpoint.tensors(part), checkpoint.path, {"r": lora.rank, "lora_alpha": lora.alpha}, expert)


def read_adapter(path: str | Path) -> Adapter:
    """An adapter from a folder of peft, a file of peft, diffusers, ComfyUI or kohya, or a checkpoint folder of a LoRA run.

    Raises:
        UserError: there is none at `path`, it is damaged, or it does more than is said above.
    """
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file() or not path.exists():  # which says so, and what there is
        checkpoint = open_checkpoint(path)
        return checkpoint_adapter(checkpoint, "ema" if checkpoint.tensors("ema") else "model")
    files = [path] if path.is_file() else [path / WEIGHT_FILE]
    if not files[0].is_file():
        files = [*path.glob("*.safetensors")]
    if len(files) != 1:
        raise UserError(
            f"{path} is no LoRA: expected a folder with {CONFIG_FILE} and {WEIGHT_FILE}, one .safetensors file, or a checkpoint "
            "folder of a run with lora=dict(...)."
        )
    state, config = read_file(files[0]), None
    header: dict[str, str] = {}
    if kind_of(files[0]) == "safetensors":
        with safe_open(files[0], "pt") as opened:
            header = opened.metadata() or {}
    file = files[0].with_name(CONFIG_FILE)
    if file.is_file() and (files[0].name == WEIGHT_FILE or any(name.startswith(PREFIX) for name in state)):
        config = _checked(read_json(file, "Copy or download the folder again."), file)
    elif HEADER in header:
        try:
            words = {
                re.sub(r"^transformer(_2)?\.", "", key): value for key, value in json.loads(header[HEADER]).items()
            }
        except (ValueError, AttributeError) as error:
            raise UserError(f"{files[0]}: {HEADER} in its header is no JSON object: {error}.") from error
        config = _checked(words, files[0])
    elif any(name.startswith(PREFIX) for name in state) and not any(name.endswith(".alpha") for name in state):
        raise UserError(f"{files[0]} is a file of peft, whose scale is in {CONFIG_FILE}; copy that file next to it.")
    return adapter_of(state, files[0], config, header.get("expert"))


def _checked(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """A config of peft that means what is read here."""
    kind, more = config.get("peft_type", "LORA"), [key for key in UNKNOWN_KINDS if config.get(key)]
    if kind != "LORA" or config.get("bias", "none") != "none" or more:
        raise UserError(f"{file}: {', '.join(more) or f'peft_type={kind!r}'}: only LoRA and DoRA of layers are read.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not is_number(rank) or rank != int(rank) or rank < 1 or not is_number(alpha):
        raise UserError(
            f"{file}: r={rank!r} and lora_alpha={alpha!r} must be a whole number from 1 and a number. Copy or download it again."
        )
    return config


def read_adapters(
    lora: str | Sequence[str] | Mapping[str, str | Sequence[str]], scale: float | Sequence[float]
) -> list[tuple[str, Adapter, float]]:
    """Path, adapter and scale of each LoRA of a config: `lora` and `lora_scale` of `InferenceConfig`.

    Raises:
        UserError: one cannot be read, there are more or fewer scales than files, or there is no such expert.
    """
    files = lora_files(lora)
    scales = [float(scale)] * len(files) if isinstance(scale, int | float) else [*scale]
    if len(scales) != len(files):
        raise UserError(f"lora_scale: {len(scales)} numbers for {len(files)} LoRAs; give one for each, or one for all.")
    if wrong := {expert for expert, _ in files} - {None, *NETWORKS}:
        raise UserError(f"lora.{min(map(str, wrong))}: the experts of a model are called high and low (noise).")
    found = []
    for (expert, path), strength in zip(files, scales, strict=True):
        adapter = read_adapter(path)
        if expert and adapter.expert not in (None, expert):
            log.warning("%s is of the %s-noise expert, and goes into the %s-noise one", path, adapter.expert, expert)
        found.append((path, adapter._replace(expert=expert or adapter.expert), strength))
    return found


def lora_files(lora: str | Sequence[str] | Mapping[str, str | Sequence[str]]) -> list[tuple[str | None, str]]:
    """Expert, or None, and path of each LoRA that `InferenceConfig.lora` names; of a run's folder that of its newest checkpoint."""
    named = lora.items() if isinstance(lora, Mapping) else [(None, lora)]
    files = [(expert, path) for expert, paths in named for path in ([paths] if isinstance(paths, str) else paths)]
    return [(expert, str(latest_checkpoint(Path(path).expanduser()) or path)) for expert, path in files]


def write_adapter(adapter: Adapter, folder: Path, *, base: str | None = None) -> Path:
    """Write `folder` as peft does; it must not be there yet.

    Args:
        adapter: with factors only.
        base: path of the weights that the adapter was trained on, for the reader.

    Raises:
        UserError: `folder` exists.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"{folder} is there already; choose another name.") from error
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        **_config(adapter),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {
        f"{PREFIX}{name}.lora_{letter}.weight": factor.detach().cpu().contiguous()
        for name, pair in adapter.factors.items()
        for letter, factor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / WEIGHT_FILE, metadata=_header(adapter))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    return folder


def write_lora_file(adapter: Adapter, out: Path, form: str, original_name: Callable[[str], str]) -> Path:
    """Write one .safetensors file that diffusers, ComfyUI, or kohya's scripts (and both others) read; it must not be there yet.

    Args:
        adapter: with factors only, of the layers of diffusers' network.
        form: "diffusers", "comfyui" or "kohya".
        original_name: diffusers' name of a tensor -> its authors'.

    Raises:
        UserError: `out` exists, or is no .safetensors.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: {form} reads one file; name it with the suffix .safetensors.")
    refuse_existing(out)
    header, tensors = _header(adapter), {}
    for name, pair in adapter.factors.items():
        words = ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
        layer = f"transformer.{name}"
        if form != "diffusers":
            theirs = original_name(f"{name}.weight").removesuffix(".weight")
            layer = f"diffusion_model.{theirs}" if form == "comfyui" else f"lora_unet_{theirs.replace('.', '_')}"
            tensors[f"{layer}.alpha"] = torch.tensor(adapter.scale_of(name) * len(pair[0]))
        tensors |= {f"{layer}.{w}.weight": f.detach().cpu().contiguous() for w, f in zip(words, pair, strict=True)}
    config = _config(adapter)
    if form == "diffusers":
        header[HEADER] = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    elif form == "kohya":
        header |= {
            "ss_network_module": "networks.lora_wan", "ss_network_dim": str(config["r"]), "ss_network_alpha": str(config["lora_alpha"]),
        }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, metadata=header)
    return out


def _config(adapter: Adapter) -> dict[str, Any]:
    """What peft's config says of a plain adapter."""
    if adapter.magnitudes or adapter.differences:
        raise ValueError("DoRA's magnitudes and differences of weights are not written.")
    ranks = {name: len(A) for name, (A, _) in adapter.factors.items()}
    rank = next(iter(ranks.values()))
    alphas = {name: adapter.scale_of(name) * ranks[name] for name in ranks}
    return {
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != adapter.scale * rank},
        "target_modules": sorted(ranks),
    }


def _header(adapter: Adapter) -> dict[str, str]:
    return {"format": "pt", **({"expert": adapter.expert} if adapter.expert else {})}


def parameters_of(model: nn.Module, adapter: Adapter, source: str | Path = "the LoRA") -> dict[str, str]:
    """The adapter's name of each layer, and `LAYER.bias` -> name of the model's parameter that it changes.

    Layers go by the model's own names, those of diffusers' network in it, and, where the model has `original_name`, those of the
    network's authors; also with _ for each dot, as in kohya's files.

    Raises:
        UserError: the model has no such layers, or has two networks and the adapter is for one, nobody says which.
    """
    two = getattr(model, "net_2", None) is not None
    both_named = any(map(SECOND.match, (*adapter.factors, *adapter.differences)))
    if both_named and not two:
        raise UserError(
            f"{source} is for two networks (transformer and transformer_2); this {type(model).__name__} is one."
        )
    if two and not both_named and adapter.expert is None:
        raise UserError(
            f"{source}: this {type(model).__name__} has two experts, and the file does not say which it is for. Say so: --lora.high FILE "
            "for the high-noise one (diffusers' transformer), --lora.low FILE for the low-noise one (transformer_2), or both."
        )
    original_name = getattr(model, "original_name", str)
    own: dict[str, str] = {}  # by network, if two, and name in a file
    for name, _ in model.named_parameters():
        network, tensor = f"{name.partition('.')[0]} " if two else "", WRAPPER.sub("", name)
        for alias in (tensor, original_name(tensor)):
            layer, dot, end = alias.removesuffix(".weight").rpartition(".bias")
            alias = layer or end
            for spelt in (alias, alias.replace(".", "_")):
                own[network + spelt + dot] = name
    changes: list[tuple[str, Tensor | None, str]] = []  # name, its shape on the meta device or None, and how to show it
    for name, (A, B) in adapter.factors.items():
        product = torch.empty(len(B), *A.shape[1:], device="meta") if len(A) == B.shape[1] else None
        changes.append((name, product, f"B {tuple(B.shape)} times A {tuple(A.shape)}"))
    changes += [(name, d, f"a difference {tuple(d.shape)}") for name, d in adapter.differences.items()]
    parameters, found, problems = dict(model.named_parameters()), {}, []
    for name, change, shown in changes:
        expert = adapter.expert if not both_named else "low" if SECOND.match(name) else "high"
        target = own.get((f"{NETWORKS[str(expert)]} " if two else "") + WRAPPER.sub("", name))
        size = None if target is None else parameters[target].shape
        m = adapter.magnitudes.get(name)
        if target is None or size is None:
            problems.append((name, "not there."))
        elif change is None or change.shape != size:
            problems.append((name, f"{tuple(size)}, the LoRA has {shown}"))
        elif m is not None and m.squeeze().shape not in ((size[0],), size[1:]):
            problems.append((name, f"{tuple(size)}, the LoRA has DoRA's magnitudes {tuple(m.shape)}"))
        else:
            found[name] = target
    if problems:
        near = [WRAPPER.sub("", name) for name, _ in model.named_modules()]
        shown = "\n".join(
            f"  {name}: {what}{did_you_mean(name, near) if what == 'not there.' else ''}" for name, what in problems[:5]
        )
        raise UserError(
            f"{source} does not fit this {type(model).__name__}: {len(problems)} of {len(changes)} layers.\n"
            f"{shown}\nUse the model that the LoRA was trained on."
        )
    return found


@torch.no_grad()
def merge_adapter(model: nn.Module, adapter: Adapter, scale: float = 1.0, source: str | Path = "the LoRA") -> int:
    """Move the weights of `model` by `scale` times what the adapter changes, in place and in fp32.

    Returns:
        How many parameters changed.

    Raises:
        UserError: the model has no such layers, see `parameters_of`, or is quantised; it is then as it was.
    """
    targets = parameters_of(model, adapter, source)
    own = {name for name, _ in model.named_parameters()}
    if any(f"{target}_scale" in own for target in targets.values()):
        raise UserError(
            f"{source} cannot be merged into quantised weights: merge it first, then store_frozen(model, ...)."
        )
    for name, (A, B) in adapter.factors.items():
        weight = model.get_parameter(targets[name])
        product = B.flatten(1).to(weight.device, torch.float32) @ A.flatten(1).to(weight.device, torch.float32)
        delta = adapter.scale_of(name) * product.reshape(weight.shape)
        update = scale * delta
        if (m := adapter.magnitudes.get(name)) is not None:
            m = m.to(update)
            m = m.unflatten(0, (-1, *[1] * (weight.ndim - 1))) if m.ndim == 1 else m  # [out, 1] or [1, in]
            whole = weight.float() + delta
            norm = torch.linalg.vector_norm(whole, dim=[d for d in range(whole.ndim) if m.shape[d] == 1], keepdim=True)
            update = scale * (m / norm * whole - weight.float())
        weight.copy_(weight.float() + update)
    for name, difference in adapter.differences.items():
        weight = model.get_parameter(targets[name])
        weight.copy_(weight.float() + scale * difference.to(weight.device, torch.float32))
    if adapter.expert and getattr(model, "net_2", None) is not None:
        log.info("%s: merged into the %s-noise expert", source, adapter.expert)
    return len({*targets.values()})
