"""`jmoe keys`: makes, lists and revokes API keys of a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving.cli.options import Commands, of_fields
from serving.request import Priority

if TYPE_CHECKING:
    from serving.frontend.keys import Key

keys = Commands(
    help="Makes, lists and revokes API keys.\n\nThe file of `jmoe serve --keys-file FILE` holds "
    "their hashes only. A running server reads it again within two seconds.",
    no_args_is_help=True,
)

File = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="File with the keys, as hashes.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key in logs and metrics.")]


@keys.command()
def new(
    name: Name,
    file: File,
    admin: Annotated[bool, typer.Option("--admin")] = False,
    metrics: Annotated[bool, typer.Option("--metrics")] = False,
    model: list[str] | None = None,
    class_: Annotated[list[Priority] | None, typer.Option("--class")] = None,
    requests_per_min: Annotated[int, typer.Option(min=0)] = 0,
    tokens_per_min: Annotated[int, typer.Option(min=0)] = 0,
    concurrency: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Makes a key and prints it once; only its hash is stored.

    Args:
        admin: May use the admin service, the page and /metrics.
        metrics: May read /metrics; without a model, class or limit nothing else.
        model: Model that it may use. May be repeated. Default: all.
        class_: Class of requests that it may make. May be repeated. Default: all.
        requests_per_min: Most requests per minute. 0: any number.
        tokens_per_min: Most tokens per minute, prompts and outputs. 0: any number.
        concurrency: Most requests at a time. 0: any number.
    """
    flags = locals() | {"models": model, "classes": class_}
    from serving.frontend.keys import Key, changing, check_name, digest, new_key

    check_name(name)
    key = new_key()
    flags["sha256"] = digest(key).hex()
    with changing(file) as found:
        if name in found:
            raise ValueError(
                f"{file} has a key named {name}; revoke it with `jmoe keys revoke {name}`, or give "
                "this one another name"
            )
        found[name] = of_fields(Key, flags)
    print(key)


@keys.command("list")
def list_(file: File) -> None:
    """Lists the names of keys and what each allows."""
    from serving.frontend.keys import read

    found = read(file)
    for name, key in found.items():
        print(f"{name:<{max(map(len, found))}}  {', '.join(_allows(key))}")


def _allows(key: "Key") -> list[str]:
    limits = ("requests_per_min", "tokens_per_min", "concurrency")
    if not key.generates:
        return ["metrics only"]
    return [
        *(word for word in ("admin", "metrics") if getattr(key, word)),
        f"models {' '.join(key.models)}" if key.models else "all models",
        f"classes {' '.join(key.classes)}" if key.classes else "all classes",
        *(f"{limit} {getattr(key, limit)}" for limit in limits if getattr(key, limit)),
    ]


@keys.command()
def revoke(name: Name, file: File) -> None:
    """Removes a key.

    Requests under way are finished; no further one begins.
    """
    from serving.frontend.keys import changing

    with changing(file) as found:
        if found.pop(name, None) is None:
            have = ", ".join(found) or "none"
            raise ValueError(f"{file} has no key named {name}; it has {have}")
    print(f"{name} is revoked")
