"""Which files hold a model's weights. Imports no torch: the fingerprint needs it in the daemon."""

from pathlib import Path

from pdnode.errors import ConfigError, Problem
from pdnode.models.rawconfig import read_json


def weight_files(model_path: Path) -> list[Path]:
    """The safetensors files of a model, in name order. ConfigError if one or all are missing."""
    index = model_path / "model.safetensors.index.json"
    single = model_path / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ConfigError([Problem(str(model_path), f"neither {single.name} nor {index.name}")])
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError([Problem(str(index), "weight_map is not a filled object")])
    names = sorted({str(name) for name in weight_map.values()})
    problems = [
        Problem(str(index), f"names {name!r}, which is no file of this directory")
        for name in names
        if Path(name).name != name or not (model_path / name).is_file()
    ]
    if problems:
        raise ConfigError(problems)
    return [model_path / name for name in names]
