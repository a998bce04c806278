"""The API reference, in HTML, from the docstrings: ``python docs/build_reference.py [FOLDER]``; needs ``.[docs]``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import pdoc
import pdoc.render

PACKAGES = ("autotune", "kernels", "search_spaces")


def public_modules() -> list[str]:
    """Every module whose path has no underscore, imported."""
    names = list(PACKAGES)
    for package in PACKAGES:
        module = importlib.import_module(package)
        names += [one.name for one in pkgutil.walk_packages(module.__path__, f"{package}.")]
    return [name for name in names if not any(part.startswith("_") for part in name.split("."))]


def main(folder: Path) -> None:
    names = public_modules()
    for name in names:
        module = importlib.import_module(name)
        for offered in getattr(module, "__all__", ()):
            # What a package loads when it is first asked for: pdoc looks into the module's own names alone.
            vars(module).setdefault(offered, getattr(module, offered))
    pdoc.render.configure(docformat="google", search=True)
    pdoc.pdoc(*PACKAGES, output_directory=folder)
    print(f"{len(names)} modules: {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))
