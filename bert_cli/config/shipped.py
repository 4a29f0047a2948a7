"""The files that are shipped in `configs/`: configs of runs by name, and the choices of `bert init`."""

from pathlib import Path

RECIPES = "recipes.json"


def configs_folder() -> Path:
    """Return the folder of the shipped configs, in a checkout or an installed wheel."""
    package = Path(__file__).parents[1]
    # A wheel has them inside the package, a checkout in the folder above it.
    installed = package / "_configs"
    if installed.is_dir():
        return installed
    return package.parent / "configs"


def named_configs() -> dict[str, Path]:
    """Return the shipped configs by name."""
    paths = sorted(configs_folder().glob("*.json"))
    return {path.stem: path for path in paths if path.name != RECIPES}
