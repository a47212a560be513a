"""What commands share: options, and settings from flags."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

AllowUnknownConfig = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Key of config.json that jmoe does not know and that changes nothing; repeatable.",
    ),
]

HubRevision = Annotated[
    str,
    typer.Option(
        metavar="REVISION",
        help="Branch, tag or commit of a model of the Hugging Face Hub; else its main branch.",
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="VARIABLE",
        help="Environment variable with the API key; else JMOE_API_KEY. A flag would show it in "
        "`ps`.",
    ),
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="PEM: who signs the server's certificate; or JMOE_TLS_CA. Encrypts."
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="PEM: this client's certificate; or JMOE_TLS_CERT."),
]
TlsKey = Annotated[
    str | None, typer.Option(metavar="FILE", help="PEM: its private key; or JMOE_TLS_KEY.")
]


def overrides(flags: Mapping[str, object], pairs: Sequence[str]) -> dict[str, object]:
    """Settings by dotted key, from flags (None: not given) and `key=value` pairs.

    Raises ValueError for a pair without `=` and for a key that is set twice.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    # A repeated flag comes as a list, and a setting that holds several values is a tuple.
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair} has no value; write --set {pair}=VALUE")
        if key in found:
            raise ValueError(f"{key} is set twice")
        found[key] = value
    return found


def models_flag(models: Sequence[str]) -> dict[str, object]:
    """What `--model` sets: one directory, or NAME=DIR of each model of a family.

    Raises ValueError for several that are not all named.
    """
    if not models:
        return {}
    if len(models) == 1 and ("=" not in models[0] or Path(models[0]).exists()):
        return {"engine.model": models[0]}
    for model in models:
        if "=" not in model:
            raise ValueError(
                f"--model {model} is one of {len(models)} and has no name; write --model "
                f"NAME={model}"
            )
    return {"engine.models": tuple(models)}
