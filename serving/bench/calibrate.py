"""Measures what a server can do on this machine, to choose meaningful objectives and load."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from serving.bench.loadgen import Steered, saturate
from serving.bench.results import Run, Slo
from serving.bench.workload import Arrival

NO_ROOM_S = 0.001
"""An objective that leaves no time to wait for anything."""
BURST_S = 0.4
"""For so long `run_all_steps` keeps the batch full, at a time."""


class CalibrationError(RuntimeError):
    """The server answered nothing that could be measured."""


@dataclass(frozen=True)
class FullBatch:
    """A server kept full: P90 latencies without queueing, and requests answered a second."""

    ttft_p90_s: float
    itl_p90_s: float
    capacity_per_s: float
    full_decode_step_s: float = math.nan  # that the server expected of one without brownout


@dataclass(frozen=True)
class Calibration:
    """Capacity and latencies without brownout (threshold 100) and with all of it (threshold 0)."""

    unloaded_ttft_s: float
    zero: FullBatch
    full: FullBatch

    @property
    def slo(self) -> Slo:
        """Objectives that brownout can keep.

        TTFT: three times the unloaded one, or that of a full batch with all the brownout, whichever
        is more: without that room for a queue, no threshold would keep it. Without brownout it is
        missed once requests queue. ITL: halfway, in ratio, between the full batch's extremes:
        without brownout a full batch misses it.
        """
        ttft_s = 3 * self.unloaded_ttft_s
        if math.isfinite(self.full.ttft_p90_s):
            ttft_s = max(ttft_s, 3 * self.full.ttft_p90_s)
        return Slo(ttft_s=ttft_s, itl_s=math.sqrt(self.zero.itl_p90_s * self.full.itl_p90_s))


async def calibrate(
    client: Steered,
    samples: Sequence[Arrival],
    *,
    strategy: str = "partial",
    window_s: float = 10.0,
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measures capacity and latencies in 4 * `window_s` and some 5 s.

    No brownout and all of it are measured in turn, twice each, and the faster of each pair counts:
    a machine that other work holds up for a while only ever makes a batch slower.

    Prompts wait for no company meanwhile: load and objectives are then the same, whatever they do
    afterwards. Leaves thresholds fixed at 0 and objectives that no step can meet: set both before
    serving.

    Raises CalibrationError, grpc.aio.AioRpcError.
    """
    concurrency = (await client.server_info()).max_num_seqs
    company = (await client.get_brownout()).prefill_company
    say("calibrating: single requests, no brownout")
    try:
        await _fix_threshold(client, strategy, 100)
        unloaded = await saturate(client, samples[:13], concurrency=1, duration_s=window_s)
        _check_answered(unloaded)
        ttfts_s = [r.ttft_s for r in unloaded.records if r.ok]
        ttfts_s = ttfts_s[1:] or ttfts_s  # the first one warms up, but may be all the window held
        found: dict[int, list[FullBatch]] = {100: [], 0: []}
        for percent, batches in [*found.items()] * 2:
            words = "no brownout" if percent else "all the brownout there is"
            say(f"calibrating: {concurrency} requests at a time, {words}")
            await _fix_threshold(client, strategy, percent)
            batches.append(await _full_batch(client, samples, concurrency, window_s))
    finally:
        await client.set_brownout(prefill_company=company)
    zero, full = (max(batches, key=lambda b: b.capacity_per_s) for batches in found.values())
    return Calibration(float(np.median(ttfts_s)), zero, full)


async def run_all_steps(
    client: Steered, samples: Sequence[Arrival], *, strategy: str = "partial", bursts: int = 12
) -> None:
    """Has the server run steps of every size without, with all and with half of the brownout.

    Each of the short bursts fills the batch, keeps it full, and lets it run empty. Thresholds take
    turns, so that a machine that gets slower does so for all of them. Takes a second a burst or
    less; what is left set is as after `calibrate`, and company is off.

    Raises CalibrationError, grpc.aio.AioRpcError.
    """
    concurrency, waiting = (await client.server_info()).max_num_seqs, cycle(samples)
    for percent in islice(cycle((100, 0, 50)), bursts):
        await _fix_threshold(client, strategy, percent)
        run = await saturate(client, waiting, concurrency=concurrency, duration_s=BURST_S)
        _check_answered(run)


def _check_answered(run: Run) -> None:
    if not any(record.ok for record in run.records):
        raise CalibrationError(f"no request was answered: {run.records[0].error}")


async def _fix_threshold(client: Steered, strategy: str, percent: int) -> None:
    await client.set_brownout(
        strategy=strategy,
        prefill_threshold_percent=percent,
        decode_threshold_percent=percent,
        ttft_slo_s=NO_ROOM_S,
        itl_slo_s=NO_ROOM_S,  # for a prefill step out of turn: what is measured sets the SLO
        prefill_company=False,  # its room hangs on the objectives, and they on what is measured
    )


async def _full_batch(
    client: Steered, samples: Sequence[Arrival], concurrency: int, window_s: float
) -> FullBatch:
    run, step_s = await asyncio.gather(
        saturate(client, cycle(samples), concurrency=concurrency, duration_s=window_s),
        _full_decode_step_s(client, window_s),
    )
    return replace(full_batch(run, 0.2 * window_s, window_s), full_decode_step_s=step_s)


async def _full_decode_step_s(client: Steered, window_s: float) -> float:
    """Returns the median of the server's estimates in a window, as it is taken of a run later: a
    single moment's may be a third too long.
    """
    expected_s = []
    for _ in range(10):
        await asyncio.sleep(window_s / 10)
        expected_s.append((await client.stats()).full_decode_step_s)
    return float(np.median(expected_s[2:]))


def full_batch(run: Run, start_s: float, end_s: float) -> FullBatch:
    """Returns what a saturated run shows of the window [start_s, end_s), in which the batch was
    full.

    Requests a second are tokens a second over mean tokens a request: answers come in waves, and
    counting those that end in the window would depend on where it cuts the waves.
    """
    done = [r for r in run.records if r.ok and r.token_s]
    gaps_s = [
        gap
        for r in done
        for at, gap in zip(r.token_s[1:], r.itls_s, strict=True)
        if start_s <= at < end_s
    ]
    if not gaps_s:
        few = f"no two tokens of an answer between {start_s:g} and {end_s:g} s: "
        few += "measure for longer, or with longer answers"
        failed = (f"{r.code} {r.error}" for r in run.records if not r.ok)
        raise CalibrationError(f"a full batch gave no latencies: {next(failed, few)}")
    num_tokens = sum(start_s <= at < end_s for r in done for at in r.token_s)
    tokens_per_request = sum(len(r.token_s) for r in done) / len(done)
    ttfts_s = [r.ttft_s for r in done if start_s <= r.at_s < end_s]
    return FullBatch(
        ttft_p90_s=float(np.percentile(ttfts_s, 90)) if ttfts_s else math.nan,
        itl_p90_s=float(np.percentile(gaps_s, 90)),
        capacity_per_s=num_tokens / (end_s - start_s) / tokens_per_request,
    )
