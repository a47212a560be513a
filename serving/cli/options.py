"""What commands share: options, settings from flags, and how `--help` looks."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from serving.cli.foreign_flags import ALIASES, advice, in_own_words, similar
from serving.config import GROUPS, ServerConfig, described, keys


class Command(TyperCommand):
    """A command whose `--help` has its options by group (`rich_help_panel`), with whole names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each group. See click.Command."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                title = getattr(param, "rich_help_panel", None)
                title = "Arguments" if is_argument else title or "Options"
                sections.setdefault(title, []).append(record)
        for title in sorted(
            sections, key=lambda title: GROUPS.index(title) if title in GROUPS else -1
        ):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses a command line; an unknown flag is an error with a hint. See click.Command."""
        given = list(args)  # the parser empties it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # NoSuchOption, of click or typer's copy of it
                unknown: Any = error
                name = unknown.option_name
                if not name.startswith("--"):  # the first letter of what was given
                    of_it = (arg.partition("=")[0] for arg in given if arg.startswith(name))
                    name = next(of_it, name)
                flags = [flag for param in self.get_params(ctx) for flag in param.opts]
                hint = self.hint(name, flags)
                unknown.message = f"No such option: {name}" + (f"; {hint}" if hint else "")
                unknown.possibilities = None  # whatever is a bit alike
            raise

    def hint(self, name: str, flags: Sequence[str]) -> str:
        """Returns what to do in place of an unknown flag, or ""."""
        return similar(name, flags)


class ServeCommand(Command):
    """`jmoe serve`, which knows vLLM's and SGLang's flags, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses a command line, with vLLM's values as well. See Command."""
        return super().parse_args(ctx, in_own_words(args))

    def hint(self, name: str, flags: Sequence[str]) -> str:
        """Returns jmoe's flag or setting for one of theirs. See Command."""
        return advice(name, flags)


AllowUnknownConfig = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Key of config.json that jmoe does not know and that changes nothing. May"
        " be repeated.",
    ),
]

Quantize = Annotated[
    Literal["auto", "none", "fp8", "int4", "mxfp4"],
    typer.Option(
        help="fp8: keep experts in eight bits; int4, mxfp4: in four. auto: as the files have them, "
        "on a CPU none."
    ),
]
KvCacheDtype = Annotated[
    Literal["auto", "fp8", "fp8_e4m3"],
    typer.Option(help="fp8: keep keys and values in eight bits. auto: in dtype."),
]
HubRevision = Annotated[
    str,
    typer.Option(
        metavar="REVISION",
        help="Branch, tag or commit of a model of the Hugging Face Hub. Default: its main branch.",
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="VARIABLE",
        help="Environment variable that holds the API key. Default: JMOE_API_KEY. (The"
        " key itself is no flag, since `ps` would show it.)",
    ),
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="PEM file with the CA that signed the server's certificate; turns on TLS."
        " Default: JMOE_TLS_CA.",
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="PEM file with this client's certificate. Default: JMOE_TLS_CERT."
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="PEM file with its private key. Default: JMOE_TLS_KEY."),
]


def documented[F: Callable[..., None]](command: F) -> F:
    """Gives the parameters that the `Args` of the command's docstring name their help from there.

    The command's own help is the text before.
    """
    command.__doc__, _, args = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    given = get_type_hints(command, include_extras=True)
    for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", args, re.MULTILINE):
        kind, option = given[name], typer.Option()
        if get_origin(kind) is Annotated:
            kind, option = get_args(kind)
        option.help = " ".join(text.split())
        command.__annotations__[name] = Annotated[kind, option]
    return command


class Commands(typer.Typer):
    """Commands that are `documented`, and whose `--help` is that of `Command`."""

    def command(self, name: str | None = None, *, cls: type[Command] = Command, **how: Any) -> Any:
        """Adds a command. See typer.Typer."""
        add = super().command(name, cls=cls, **how)
        return lambda function: add(documented(function))


def given_flags(context: typer.Context) -> set[str]:
    """Returns the flags that the command line has, by their long names; without those that it turns
    off.
    """
    return {
        param.opts[0]
        for param in context.command.params
        if (source := context.get_parameter_source(str(param.name))) is not None
        and source.name == "COMMANDLINE"
        and context.params.get(str(param.name)) is not False
    }


def of_fields[T](kind: type[T], flags: Mapping[str, Any]) -> T:
    """Makes a dataclass of the flags that are called as its fields, of lists tuples. Other fields,
    and those of flags that are not given (None), keep their defaults.
    """
    named = (field.name for field in fields(cast(Any, kind)))
    given = {name: flags[name] for name in named if flags.get(name) is not None}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def flag_keys() -> dict[str, str]:
    """Returns the settings that have a flag of `jmoe serve`, by the flag's name as a parameter."""
    named = {key: setting for key, setting in described().items() if setting.group}
    return {
        (setting.flag or key.split(".")[-1]).replace("-", "_"): key
        for key, setting in named.items()
    }


def setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` a flag for every setting in `flag_keys`; its `**flags` get what is given.

    A flag that is not given is None.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_flag(key))
        for name, key in flag_keys().items()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return command


def _flag(key: str) -> Any:
    """Returns the annotated type of the flag of a setting."""
    setting, kind = described()[key], keys()[key]
    name = "--" + (setting.flag or key.split(".")[-1].replace("_", "-"))
    if setting.range is not None and setting.range.choices:
        kind = Literal[setting.range.choices]
    elif kind == tuple[str, ...]:
        kind = list[str]
    option = typer.Option(
        *((f"{name}/--no-{name[2:]}",) if kind is bool else (name, *ALIASES.get(name, ()))),
        help=f"{setting.help}{_said_beside(key)}",
        metavar=setting.metavar or None,
        rich_help_panel=setting.group,
    )
    return Annotated[kind | None, option]


def _said_beside(key: str) -> str:
    """Returns the default and range of a setting, as its help shows them."""
    default, within = attrgetter(key)(ServerConfig()), described()[key].range
    said = [f"default: {_text(default)}"] if default not in ("", ()) else []
    if within is not None and not within.choices:
        said.append(within.wanted)
    return f" [{'; '.join(said)}]" if said else ""


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def overrides(flags: Mapping[str, object], pairs: Sequence[str]) -> dict[str, object]:
    """Returns settings by dotted key, from flags (None: not given) and `key=value` pairs.

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
    """Returns what `--model` sets: one directory, or NAME=DIR of each model of a family.

    Raises ValueError for several that are not all named.
    """
    if not models:
        return {}
    if len(models) == 1 and ("=" not in models[0] or Path(models[0]).exists()):
        return {"engine.model": models[0], "engine.models": ()}
    for model in models:
        if "=" not in model:
            raise ValueError(
                f"--model {model} is one of {len(models)} and has no name; write --model "
                f"NAME={model}"
            )
    return {"engine.models": tuple(models)}


def family_flag(models: Sequence[str], family: Path | None) -> dict[str, str]:
    """Returns the directories that `--model` names; that of a single model, without `--family`, by
    "". Raises ValueError where the two do not go together.
    """
    given = models_flag(models)
    if family is None:
        if "engine.model" in given:
            return {"": str(given["engine.model"])}
        raise ValueError(
            f"--model is given for {len(models)} models; name their map with --family, or one model"
        )
    if not family.is_file():
        raise ValueError(f"--family is {family}; there is no such file")
    if "engine.models" not in given or len(models) < 2:
        raise ValueError("--family needs --model NAME=DIR for each model that it is of")
    return {name: path for name, _, path in (model.partition("=") for model in models)}
