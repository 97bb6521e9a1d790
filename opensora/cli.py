"""The command `opensora`, or `python -m opensora`: the scripts and tools of the project, from any folder.

A wheel has scripts/, tools/, configs/ and assets/ inside the package (setup.py puts them there); an editable install uses the clone's.
Nothing but the standard library is imported before the command is known, and nothing heavy for the help of `train` and `sample`.
"""

import importlib
import sys
from difflib import get_close_matches
from typing import NoReturn

from opensora import __version__

COMMANDS = {
    "train": ("scripts.train", "train a denoiser: opensora train CONFIG [--field value ...]"),
    "sample": ("scripts.inference", "sample videos: opensora sample CONFIG_OR_CHECKPOINT [--prompt TEXT]"),
    "finetune": ("tools.finetune", "fine-tune a model on a folder of clips: opensora finetune FOLDER"),
    "doctor": ("tools.datasets.doctor", "check a table before training: opensora doctor CONFIG --data-path TABLE"),
    "demo": ("tools.demo", "sample in the browser: opensora demo [CONFIG]"),
}
USAGE = f"""usage: opensora COMMAND [ARGUMENT ...]

{chr(10).join(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())}
  run       any other script or tool: opensora run tools.convert; without a name, the list of them

`opensora COMMAND --help` lists the arguments of a command, `opensora --version` prints the version.
On several GPUs: torchrun --standalone --nproc_per_node 8 -m opensora train CONFIG
"""


def main() -> None:
    """Run the command that `sys.argv` names, in this process."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
    elif name in ("-V", "--version"):
        sys.stdout.write(f"opensora {__version__}\n")
    elif name == "run":
        program, *arguments = arguments or ["--help"]
        program = program.removesuffix(".py").replace("/", ".")  # tools/convert.py is another way to write it
        start(program, f"opensora run {program}", arguments)
    elif name in COMMANDS:
        start(COMMANDS[name][0], f"opensora {name}", arguments)
    else:
        fail(f"there is no command {name!r}.", name, [*COMMANDS, "run"], USAGE)


def start(program: str, called: str, arguments: list[str]) -> None:
    """Call `main` of a script or tool, `scripts.train` or `tools.convert`, with `arguments` as its command line."""
    from opensora.utils.folders import REPOSITORY

    files = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
        for folder in ("scripts", "tools")
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    programs = {
        name.removesuffix(".__main__"): name for name, path in files.items() if "\ndef main(" in path.read_text()
    }
    if program in ("-h", "--help"):
        sys.stdout.write("\n".join(["usage: opensora run PROGRAM [ARGUMENT ...]", "", *sorted(programs), ""]))
        return
    if program not in programs:
        fail(f"there is no program {program!r}; `opensora run` lists them.", program, list(programs))
    sys.path.insert(0, str(REPOSITORY))  # before packages of the same names that somebody else installed
    sys.argv = [called, *arguments]  # as it stands in usage messages and in the command that resumes a run
    if {"-h", "--help"} & {*arguments}:  # of the scripts with a config: the program itself takes seconds to import
        from opensora.config.load import parse_config
        from opensora.config.resolve import SCRIPTS

        for schema, script in SCRIPTS.items():
            if script == f"{program.replace('.', '/')}.py":
                parse_config(schema)
    importlib.import_module(programs[program]).main()


def fail(problem: str, word: str, known: list[str], usage: str = "") -> NoReturn:
    """End with exit code 2, as the scripts do with a `UserError`; the nearest of what is known is named."""
    near = get_close_matches(word, known, n=1)
    sys.stderr.write(f"error: {problem}{f' Did you mean {near[0]!r}?' if near else ''}\n\n{usage}")
    sys.exit(2)
