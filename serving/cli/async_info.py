"""`jmoe info MODEL --mesh ep=N --in-flight T`: what asynchronous expert parallelism would make."""

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jmoe.config import ModelConfig
from jmoe.display import seconds
from jmoe.parallel import asynchronous
from jmoe.parallel.asynchronous import Forecast, Late
from jmoe.parallel.cost import H200
from serving.cli.info import Section
from serving.cli.model_info import DTYPE, DTYPE_BYTES

CONTEXT = 256.0
HOSTS = "attention_host_s", "expert_host_s"
MOST_SPLITS = 16
"""On more devices only the split that is advised is shown."""
MOST_DEVICES, MOST_IN_FLIGHT = 1024, 1_000_000
"""What a forecast takes grows with both: seconds, here."""


def parse_imbalance(text: str) -> tuple[float, float]:
    """Parses `BEFORE,AFTER`: the fullest device's visits over the mean, without and with copies.

    Raises ValueError for anything else.
    """
    try:
        before, after = map(float, text.split(","))
    except ValueError:
        wanted = "write two numbers, as 1.7,1.3: without and with copies of busy experts"
        raise ValueError(f"--imbalance is '{text}'; {wanted}") from None
    return before, after


def parse_late(text: str) -> Late:
    """Parses `FACTOR,SHARE`, or measures the stages in a timeline of a server of mode aep.

    Raises ValueError for anything else.
    """
    if not Path(text).exists():
        try:
            factor, share = map(float, text.split(","))
        except ValueError:
            raise ValueError(
                f"--late is '{text}'; write two numbers, as 10,0.02: times as long, and the share "
                "of stages; or name a file of `jmoe serve --mode aep --timeline FILE`"
            ) from None
        return Late(factor, share)
    try:
        return Late.measured(_stages(json.loads(Path(text).read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--late is {text}, a timeline without stages: {error}") from None


def _stages(timeline: dict[str, Any]) -> Collection[list[float]]:
    """Returns the microseconds of a timeline's stages, by worker, rows (in powers of two), and
    whether it is of the first layer, whose attention has the head beside it.
    """
    found = defaultdict[Any, list[float]](list)
    for event in timeline["traceEvents"]:
        if event["ph"] == "X" and "waiting" in (args := event.get("args", {})):
            kind = event["tid"], int(args["rows"]).bit_length(), args["layer"] == 0
            found[kind].append(event["dur"])
    return found.values()


def asynchronous_section(
    cfg: ModelConfig,
    num_devices: int,
    in_flight: int,
    *,
    device_gb: float,
    context: float = CONTEXT,
    imbalance: tuple[float, float] = (1.0, 1.0),
    host_us: float | None = None,
    stage_times: Path | None = None,
    late: str = "",
) -> Section:
    """Describes every split of a mesh's devices, the synchronous ways, and the advice.

    Args:
        cfg: the model.
        num_devices: of the mesh.
        in_flight: sequences that decode at once.
        device_gb: memory of each device, in 1e9 bytes; a tenth is left free.
        context: tokens of KV a sequence, on average.
        imbalance: without and with copies, as `parse_imbalance` has it.
        host_us: microseconds in which a worker's host launches a stage, of either kind; None:
            those of `Overheads`.
        stage_times: file of measured times (`jmoe.parallel.stage_times.measured`).
        late: as `parse_late` has it; empty: no stage is.

    Raises ValueError for a number that is none, or a file without stage times.
    """
    given = {} if host_us is None else dict.fromkeys(HOSTS, 1e-6 * host_us)
    _check(num_devices, in_flight, context, imbalance, host_us)
    deployment = asynchronous.Deployment.of(
        cfg,
        num_devices,
        in_flight,
        DTYPE_BYTES,
        device=H200._replace(memory_bytes=0.9 * 1e9 * device_gb),
        context=context,
        stage_times=stage_times,
        overheads=asynchronous.Overheads(**given),
        imbalance=imbalance[0],
        imbalance_with_copies=imbalance[1],
        late=parse_late(late) if late else asynchronous.ON_TIME,
    )
    factor, share = deployment.late
    lateness = f"{100 * share:.3g} % of stages take {factor:.3g} times as long"
    found, over = asynchronous.advise(deployment), deployment.overheads
    best = found.forecast
    rate = f"{best.tokens_per_s:,.0f} tokens/s, {found.ratio:.2f} times the better one"
    every = asynchronous.forecasts(deployment) if num_devices <= MOST_SPLITS else [best]
    whole = map(seconds, (best.whole_attention_s, best.whole_experts_s))
    hosts_s = over.attention_host_s, over.expert_host_s
    source = "by a roofline" if stage_times is None else f"from {stage_times}"
    heading = f"Asynchronous expert parallelism, {num_devices} devices, {in_flight:,} in flight, "
    return (
        f"{heading}{context:g} tokens of KV each, {DTYPE}, stage times {source}, a forecast",
        [
            *((f"{_split(one)}, attention + experts", _forecast(one)) for one in every),
            (f"stages of whole batches, {_split(best)}", " and ".join(whole)),
            ("host of a stage", _hosts(hosts_s, given=bool(given))),
            ("rows travel at", f"{1e-9 * over.bytes_per_s:g} GB/s, as built"),
            ("late", f"{lateness}, by {late}" if late else "none"),
            ("synchronous", f"{found.synchronous_tokens_per_s:,.0f} tokens/s"),
            ("synchronous with copies", f"{found.copies_tokens_per_s:,.0f} tokens/s"),
            ("asynchronous", f"{rate}, on {_split(best)}"),
            ("advice", f"{'use it' if found.pays else 'do not use it'}: {found.reason}"),
        ],
    )


def _check(
    num_devices: int,
    in_flight: int,
    context: float,
    imbalance: tuple[float, float],
    host_us: float | None,
) -> None:
    """Raises ValueError that names the option at fault; `Deployment` checks all else."""
    if not 2 <= num_devices <= MOST_DEVICES:
        wanted = f"for --in-flight it must be between ep=2 and ep={MOST_DEVICES}"
        raise ValueError(f"--mesh is ep={num_devices}; {wanted}")
    if not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise ValueError(f"--in-flight is {in_flight}; it must be between 1 and {MOST_IN_FLIGHT:,}")
    if not 0 < context < 1e9:
        raise ValueError(f"--context is {context:g}; it must be above 0")
    if host_us is not None and not 0 <= host_us < 1e9:
        raise ValueError(f"--host-us is {host_us:g}; it must be 0 or more")
    if not all(1 <= one <= num_devices for one in imbalance):
        given = ",".join(f"{one:g}" for one in imbalance)
        wanted = f"both must be between 1 and the number of devices ({num_devices})"
        raise ValueError(f"--imbalance is {given}; {wanted}")


def _hosts(host_s: tuple[float, float], *, given: bool) -> str:
    if given:
        return f"{seconds(host_s[0])}, given and not measured"
    return " and ".join(map(seconds, host_s)) + ", as built"


def _split(found: Forecast) -> str:
    return f"{found.attention_devices} + {found.expert_devices}"


def _forecast(found: Forecast) -> str:
    """Returns the line of a split."""
    stages = f"stages of {found.attention_rows:,} rows, {seconds(found.attention_s)}, and "
    stages += f"{found.expert_visits:,} visits, {seconds(found.experts_s)}"
    under_way = f"{found.batches:.0f} batches under way"
    room = f"room for {found.sequences_that_fit:,} sequences"
    itl = f"ITL {1e3 * found.itl_s:.0f} ms"
    return f"{found.tokens_per_s:,.0f} tokens/s, {itl}; {stages}; {under_way}; {room}"
