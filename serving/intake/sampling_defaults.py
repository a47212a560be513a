"""Reads how a model's maker says that it is to be sampled: defaults of `generation_config.json`."""

import logging
from pathlib import Path
from typing import Any

from jmoe.config import GENERATION_FILE, ConfigError, read_generation_config
from serving.errors import InvalidRequest, shown
from serving.request import MODEL_DEFAULTS, SamplingParams

log = logging.getLogger(__name__)


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Returns what a model's directory has of `MODEL_DEFAULTS`, as vLLM reads it: whatever
    `do_sample` is. Logs what applies.

    A value out of range is logged and left out, since a published file must not keep its model from
    being served.
    """
    try:
        stored = read_generation_config(directory)
    except ConfigError as error:
        log.warning("%s; there are no sampling defaults", error)
        return {}
    found: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        if (value := stored.get(name)) is None:
            continue
        try:
            if isinstance(value, bool):
                raise InvalidRequest(f"{name} is {shown(value)}; it must be a number")
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("%s: %s; it is no sampling default", directory / GENERATION_FILE, error)
        else:
            found[name] = value
    if found:
        said = ", ".join(f"{name} {value:g}" for name, value in found.items())
        log.info(
            "sampling defaults of %s: %s; --generation-config none turns them off",
            f"{directory.name}/{GENERATION_FILE}",
            said,
        )
    return found
