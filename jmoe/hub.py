"""Models of the Hugging Face Hub: OWNER/NAME wherever a model directory is taken.

Files come through `huggingface_hub`, into its cache and by its rules: HF_HOME says where that is,
HF_HUB_OFFLINE that nothing is asked for, HF_TOKEN who asks, HF_ENDPOINT whom.
"""

import re
from functools import cache
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME."""

SMALL_FILES = ("*.json", "*.jinja")
"""What describes a model: configuration, tokenizer, chat templates, index of shards."""
WEIGHTS = ("*.safetensors", "state/*")
"""In shards, united experts and probes beside them; and jmoe's own format."""
NOT_READ = ("consolidated*", "original/*", "onnx/*")
"""Weights that some publishers store a second time, for others."""


class HubError(ValueError):
    """A model of the Hub that cannot be fetched; says what was tried."""


def locate(path: str | Path, revision: str = "", *, weights: bool = True) -> Path:
    """Returns the directory that a path means: itself, or that of a model of the Hub.

    A directory wins over a model of the Hub that is called the same. What is no OWNER/NAME either
    is returned as it is, for who reads it to say that it is not there.

    Args:
        path: a directory, or OWNER/NAME.
        revision: branch, tag or commit of a model of the Hub; empty: its main branch. Which commit
            a branch means is asked once a process.
        weights: False for a directory that describes the model, and no more.

    Raises HubError.
    """
    if Path(path).exists() or not HUB_NAME.fullmatch(str(path)):
        return Path(path)
    return _snapshot(str(path), revision, weights)


@cache
def _snapshot(name: str, revision: str, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = f"{constants.ENDPOINT}/{name}" + f", revision {revision}" * bool(revision)
    try:
        found = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=[*SMALL_FILES, *(WEIGHTS if weights else ())],
            ignore_patterns=list(NOT_READ),
        )
    except GatedRepoError:
        why = f"{wanted} is gated: accept its terms there, and set HF_TOKEN to a token of yours"
    except RepositoryNotFoundError:
        why = f"{wanted} is not there, or not for this machine to see: a private one needs HF_TOKEN"
    except RevisionNotFoundError:
        why = f"{wanted} is not there: it has no such branch, tag or commit"
    except LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it does not answer"
        cause = error.__cause__
        reason = f" ({_line(cause)})" if cause is not None and not constants.HF_HUB_OFFLINE else ""
        why = (
            f"{wanted} was not asked or gave nothing, since {offline}{reason}; and the cache in "
            f"{constants.HF_HUB_CACHE} does not have all of it"
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why = f"{wanted} cannot be had: {_line(error)}"
    else:
        return Path(found)
    raise HubError(f"{name} is no directory here, and {why}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
