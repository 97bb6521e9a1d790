"""What pyproject.toml cannot say: a wheel has scripts/, tools/, configs/ and assets/ inside the package, as opensora/_repository.

An editable install uses those of the clone.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("scripts", "tools", "configs", "assets")
LEFT_OUT = (
    "__pycache__",
    "*.pyc",
    "build",
    "vae-video-small",
    "wan-quickstart",
)  # of assets: how they were made, and models that only examples use


class BuildWithFolders(build_py):
    """Copies the folders next to the package's modules."""

    def run(self) -> None:
        super().run()
        repository = Path(self.build_lib, "opensora", "_repository")
        shutil.rmtree(repository, ignore_errors=True)  # of an earlier build
        for folder in () if self.editable_mode else FOLDERS:
            shutil.copytree(folder, repository / folder, ignore=shutil.ignore_patterns(*LEFT_OUT))


setup(cmdclass={"build_py": BuildWithFolders})
