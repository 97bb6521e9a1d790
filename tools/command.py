"""The command line of a tool: argparse with the same manners in all of them."""

import argparse
import inspect
import itertools
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from opensora.registry import did_you_mean


class Parser(argparse.ArgumentParser):
    """Flags with dashes or underscores, no abbreviations, a hint for a mistyped one; `--help` shows defaults.

    Args:
        description: the docstring; wrapped to the terminal, but for indented lines and lists.
        module: `__spec__` of the tool, for the name in the usage: `python -m tools.convert`, or what the console command is called.
        settings: of `argparse.ArgumentParser`.
    """

    def __init__(self, description: str | None = None, module: ModuleSpec | None = None, **settings: Any) -> None:
        if Path(sys.argv[0]).name.startswith("opensora "):
            settings.setdefault("prog", Path(sys.argv[0]).name)
        elif module is not None:
            settings.setdefault("prog", f"python -m {module.name.removesuffix('.__main__')}")
        super().__init__(
            description=inspect.cleandoc(description or ""), formatter_class=_Help, allow_abbrev=False, **settings
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse; of several faults, a flag that does not exist is reported first."""
        args = sys.argv[1:] if args is None else args
        flags = [*self._option_string_actions]
        for action in self._actions:  # the commands' own, too
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for command in action.choices.values() for flag in command._option_string_actions]
        dashed = [flag.replace("_", "-") for flag in flags]
        for arg in itertools.takewhile(lambda arg: arg != "--", args):
            flag = arg.partition("=")[0]
            if flag.startswith("--") and flag.replace("_", "-") not in dashed:
                self.error(f"unrecognized argument {flag}.{did_you_mean(flag, flags)}")
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, with `--data_path` for `--data-path` and the reverse; all parsing, also of commands, goes through this."""
        spelled = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        args = list(sys.argv[1:] if args is None else args)
        for i, arg in enumerate(args):
            flag, equals, value = arg.partition("=")
            if flag.startswith("--"):
                args[i] = spelled.get(flag.replace("_", "-"), flag) + equals + value
        return super().parse_known_args(args, namespace)


class _Help(argparse.HelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        default, about = action.default, action.help or ""
        shown = not (default is None or default is False or default in (argparse.SUPPRESS, (), [], ""))
        if shown and action.option_strings and about != argparse.SUPPRESS and "default" not in about:
            text = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
            action.help = f"{about} (default: {text.replace('%', '%%')})".strip()
        super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        groups = itertools.groupby(text.splitlines(), key=lambda line: line.startswith(("  ", "- ", "|")) or not line)
        return "\n".join("\n".join(lines) if kept else textwrap.fill(" ".join(lines), width) for kept, lines in groups)
