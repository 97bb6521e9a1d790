"""Name -> constructor tables. The only module every part of opensora may import.

python -m opensora.registry                        every registered name, with one line about it
python -m opensora.registry STDiT-XL/2             one name: what it is, its arguments and their defaults
python -m opensora.registry --registry scheduler   one table: model, scheduler, dataset or plugin
"""

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mmengine.registry import Registry as _MMRegistry

from opensora import contracts
from opensora.contracts import PartError, broken_contract, check_contract, has_methods


def did_you_mean(word: str, choices: list[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?` when a choice is close to `word` (1: the same, 0: nothing in common), else an empty string."""
    close = get_close_matches(word, choices, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry(_MMRegistry):
    """An MMEngine registry whose miss tells the reader what would have hit, and whose parts obey a contract.

    Args:
        name: what messages call its parts.
        contract: a Protocol of `opensora.contracts` that its parts obey; None: any part is taken.
        options: MMEngine's.
    """

    def __init__(self, name: str, contract: type | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self.contract, self.kinds = contract, [self]

    def of_kind(self, name: str, contract: type) -> "Registry":
        """One kind of the parts: the same table, of which only these are listed and built, with their contract checked."""
        kind = Registry(name, contract, scope=self.scope, locations=self._locations)
        kind._module_dict, kind.kinds = self._module_dict, self.kinds
        self.kinds.append(kind)
        return kind

    def build(self, cfg: Mapping[str, Any], **runtime: Any) -> Any:
        """Call the constructor named by `cfg["type"]` with the other keys of `cfg` and with `runtime`.

        `cfg` comes from a config file; `runtime` holds what no config can know (the VAE's channels, a process
        group). Of `runtime`, only what the constructor takes is passed.

        Raises:
            PartError: `type` is missing, unknown or of another kind, the part breaks the contract, an argument is unknown or
                refused by the constructor, or a key has one value in `cfg` and another in `runtime`: there is one truth.
        """
        problems = self.problems(cfg)
        if problems:
            raise PartError("\n".join(problems))
        constructor = self.get(cfg["type"])
        given = {key: value for key, value in cfg.items() if key != "type"}
        taken = _parameters(constructor)
        runtime = {key: value for key, value in runtime.items() if key in taken}
        for key in sorted(given.keys() & runtime.keys()):
            if given[key] != runtime[key]:
                raise PartError(
                    f"{self.name} {cfg['type']!r}: the config sets {key}={given[key]!r}, but the other components "
                    f"need {runtime[key]!r}; drop {key} from the config."
                )
        try:
            part = constructor(**{**given, **runtime})
        except ValueError as error:
            if type(error) is not ValueError:  # a UserError, which says where it comes from
                raise
            raise PartError(f"{self.name} {cfg['type']!r}: {error}") from error
        if self.contract is not None:
            check_contract(part, self.contract)
        return part

    def problems(self, cfg: Mapping[str, Any]) -> list[str]:
        """What is wrong with a component dict, one sentence each: an unknown type, a broken contract, unknown arguments."""
        if not isinstance(cfg, Mapping) or "type" not in cfg:
            return [f"{self.name}: expected dict(type=NAME, ...), got {cfg!r}. Names: {', '.join(self.choices())}."]
        name = cfg["type"]
        constructor = self.get(str(name))
        if constructor is None:
            hint = did_you_mean(str(name), self.choices())
            return [f"{name!r} is not a registered {self.name}.{hint} Choices: {', '.join(self.choices())}."]
        cls, taken = inspect.unwrap(constructor), _parameters(constructor)
        if self.contract is not None and inspect.isclass(cls):
            broken = broken_contract(cls, self.contract)
            if (kind := self._kind(cls)) not in (None, self.name):
                advice = f"Choices: {', '.join(self.choices())}." if _is_ours(cls) else broken
                return [f"{name!r} is a {kind}, not a {self.name}. {advice}"]
            if broken:
                return [broken]
        return [
            f"{self.name} {name!r} takes no argument {key!r}.{did_you_mean(key, taken)} It takes: {', '.join(taken)}."
            for key in cfg
            if key != "type" and key not in taken
        ]

    def get(self, key: str) -> Any:
        """The constructor that is registered under a name; None = there is none.

        MMEngine would import whatever a dotted name says: a config may be that of a checkpoint, which is data and runs nothing.
        """
        self.import_from_location()
        return self.module_dict.get(key.removeprefix(f"{self.scope}."))

    def choices(self) -> list[str]:
        """All registered names, sorted; of a kind those of its parts, and of classes of a user's own that fit none yet."""
        self.import_from_location()
        if self.contract is None:
            return sorted(self.module_dict)
        kinds = {name: self._kind(inspect.unwrap(part)) for name, part in self.module_dict.items()}
        is_own = {name: not _is_ours(inspect.unwrap(self.module_dict[name])) for name in kinds}
        return sorted(name for name, kind in kinds.items() if kind == self.name or (kind is None and is_own[name]))

    def _kind(self, cls: Any) -> str | None:
        """The name of the kind whose methods a class has most of; None: it has none of any, or is a function."""
        best, most = None, (0, 0.0)
        for kind in self.kinds if inspect.isclass(cls) else ():
            found = (0, 0.0) if kind.contract is None else has_methods(cls, kind.contract)
            if found > most:
                best, most = kind.name, found
        return "discriminator" if best is None and _is_ours(cls) else best  # that has `forward` alone

    def register_variant(self, name: str, constructor: Callable[..., Any], **preset: Any) -> None:
        """Register `constructor` under `name` with other defaults; a config may still override each of them."""
        signature = inspect.signature(constructor)
        if unknown := preset.keys() - signature.parameters.keys():
            raise TypeError(f"{name}: {constructor.__name__} takes no {sorted(unknown)}")

        @functools.wraps(constructor, updated=())
        def variant(**kwargs: Any) -> Any:
            return constructor(**{**preset, **kwargs})

        variant.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                parameter.replace(default=preset[key], kind=inspect.Parameter.KEYWORD_ONLY)
                if key in preset
                else parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for key, parameter in signature.parameters.items()
            ]
        )
        self.register_module(name=name, module=variant)


def inherit_signature(cls: type) -> None:
    """Let `inspect.signature`, and so the registry, list the base class' arguments for the `**options` of a constructor.

    To be called from the base's `__init_subclass__`; arguments that a class names itself are its own.
    """
    if "__init__" not in vars(cls):
        return
    own = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
    if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
        names = {parameter.name for parameter in own}
        inherited = inspect.signature(cls.__bases__[0]).parameters.values()
        own[-1:] = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inherited if p.name not in names]
    cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]


def _is_ours(cls: Any) -> bool:
    return cls.__module__.startswith("opensora.")


def _parameters(constructor: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(constructor).parameters if name != "self"]


def build_module(cfg: Mapping[str, Any], registry: Registry, **runtime: Any) -> Any:
    """`registry.build`, in the argument order that Open-Sora's users know."""
    return registry.build(cfg, **runtime)


MODELS = Registry("model", scope="opensora", locations=["opensora.models", "opensora.inference.text"])
DENOISERS = MODELS.of_kind("denoiser", contracts.Denoiser)
VAES = MODELS.of_kind("VAE", contracts.VAE)
TEXT_ENCODERS = MODELS.of_kind("text encoder", contracts.TextEncoder)
IMAGE_ENCODERS = MODELS.of_kind("image encoder", contracts.ImageEncoder)
DISCRIMINATORS = MODELS.of_kind("discriminator", contracts.Discriminator)
SCHEDULERS = Registry("scheduler", contracts.Scheduler, scope="opensora", locations=["opensora.schedulers"])
SAMPLERS = SCHEDULERS.of_kind("scheduler", contracts.Sampler)  # what samples need not train
DATASETS = Registry("dataset", contracts.Dataset, scope="opensora", locations=["opensora.datasets"])
PLUGINS = Registry("plugin", scope="opensora", locations=["opensora.acceleration"])
SEE_MODULE = " (see the module's docstring)"
REGISTRIES = {registry.name: registry for registry in (MODELS, SCHEDULERS, DATASETS, PLUGINS)}


def list_registered(registries: Sequence[Registry]) -> str:
    """Every name with the first line of its documentation; a variant with the defaults that it changes."""
    blocks = []
    for registry in registries:
        names = registry.choices()
        width = max((len(name) for name in names), default=0)
        rows = [f"  {name:<{width}}  {_one_line(registry.get(name))}" for name in names]
        blocks.append("\n".join([f"{registry.name} ({len(names)})", *rows]))
    return "\n\n".join(blocks)


def describe_registered(name: str, registry: Registry) -> str:
    """What a name stands for, its arguments with types and defaults, and its documentation."""
    constructor = registry.get(name)
    origin = inspect.unwrap(constructor)
    doc = inspect.getdoc(constructor) or "no description"
    if SEE_MODULE in doc:
        doc = f"{(sys.modules[origin.__module__].__doc__ or '').strip()}\n\n{doc}"
    base = origin
    while "common" in inspect.signature(base.__init__).parameters:  # arguments that the base documents
        base = base.__base__
        doc = f"{doc}\n\n{base.__name__}: {inspect.getdoc(base)}"
    parameters = [p for key, p in inspect.signature(constructor).parameters.items() if key != "self"]
    return "\n".join(
        [
            f"{name}: {registry.name}, {origin.__module__}.{origin.__qualname__}",
            "",
            *(
                f"  {p.replace(kind=inspect.Parameter.KEYWORD_ONLY)}".replace("collections.abc.", "")
                for p in parameters
            ),
            "",
            doc,
        ]
    )


def _one_line(constructor: Callable[..., Any]) -> str:
    line = (inspect.getdoc(constructor) or "no description").splitlines()[0].replace(SEE_MODULE, "")
    changed = _changed_defaults(constructor)
    return f"{line} [{', '.join(changed)}]" if changed else line


def _changed_defaults(constructor: Callable[..., Any]) -> list[str]:
    """`depth=12` for each default in which a variant differs from what it is a variant of."""
    ours = inspect.signature(constructor).parameters
    plain = inspect.signature(inspect.unwrap(constructor)).parameters
    return [f"{key}={p.default!r}" for key, p in ours.items() if key in plain and plain[key].default != p.default]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; an unknown name ends it with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m opensora.registry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="a registered name, to be described in detail")
    parser.add_argument("--registry", choices=list(REGISTRIES), help="only this table")
    args = parser.parse_args(argv)
    chosen = [REGISTRIES[args.registry]] if args.registry else list(REGISTRIES.values())
    if args.name is None:
        sys.stdout.write(list_registered(chosen) + "\n")
        return
    names = {name: registry for registry in chosen for name in registry.choices()}
    if args.name not in names:
        parser.error(f"{args.name!r} is not registered.{did_you_mean(args.name, list(names))}")
    sys.stdout.write(describe_registered(args.name, names[args.name]) + "\n")


if __name__ == "__main__":
    # this file as a program is a module of its own, whose tables stay empty
    from opensora import registry as canonical

    canonical.main()
