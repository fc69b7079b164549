"""The device of the engine, where the configuration leaves it to the host or the host lacks it."""

import dataclasses
from collections.abc import Callable

from pdnode.config import Config
from pdnode.configrules import DEVICE_RULES, GPU_REGIONS, broken
from pdnode.engine.device import choose_device, missing_for_cuda
from pdnode.errors import ConfigError, DeviceMissing

_WHERE = "engine.device"


def with_device(config: Config, missing: Callable[[], str] = missing_for_cuda) -> Config:
    """`config` with "cpu" or "cuda" as its device, and the reason in `engine.device_reason`.

    DeviceMissing where it asks for CUDA, or names GPUs, and the host lacks something of it;
    ConfigError where other keys do not fit the device that "auto" took.
    """
    device, reason = config.engine.device, "as configured"
    if device == "auto":
        choice = choose_device(missing)
        device, reason = choice.device, choice.reason
        if device == "cpu" and config.engine.gpus and config.kv.region not in GPU_REGIONS:
            raise DeviceMissing(f"engine.gpus: the GPUs named here cannot be used: {reason}")
    elif device == "cuda" and (text := missing()):
        raise DeviceMissing(f'{_WHERE}: "cuda" cannot be used: {text}')
    engine = dataclasses.replace(config.engine, device=device, device_reason=reason)
    resolved = dataclasses.replace(config, engine=engine)
    if problems := broken(resolved, DEVICE_RULES, frozenset()):
        raise ConfigError(problems)
    return resolved
