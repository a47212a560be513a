"""The pairs by name."""

from functools import partial

from benchmarks.pairs.burst import bursts, replays
from benchmarks.pairs.engines import OUTPUTS, outputs, parts, prefixes
from benchmarks.pairs.harness import Pair
from benchmarks.pairs.served import PEER_FIGURES, STREAMS, Load, peers, served
from benchmarks.pairs.steps import WAY, caches, decode, expert_op, formats
from jmoe.brownout import Brownout, LowestGate

_OUTPUTS = {
    f"{kind}, {f'steps of {step_ms:g} ms' if step_ms else 'this CPU'}": (step_ms, kind)
    for step_ms in (0.0, 16.0, 8.0)
    for kind in OUTPUTS
}
_MASKED = [
    (name, name.replace(kind, base))
    for name, (_, kind) in _OUTPUTS.items()
    if kind in ("regex", "schema")
    for base in ("greedy", "sampled")
]
_KEPT = {
    "bfloat16": ("bfloat16", "none"),
    "float32": ("float32", "none"),
    **{fmt: ("bfloat16", fmt) for fmt in ("fp8", "int4", "mxfp4")},
}
_IN_LEVELS = {
    "the paper's": {"keep": "visits", "controller": "algorithm2"},
    "today's in levels": {},
}
PAIRS: dict[str, Pair] = {
    "secured": Pair(
        "What keys and TLS cost a server whose steps last 16 ms.",
        {"plain": Load(16.0), "secured": Load(16.0, secured=True)},
        served,
        ("tokens_per_s", "server_us_per_token"),
        rounds=20,
    ),
    "http": Pair(
        "What HTTP costs the server beside gRPC; steps last 8 ms.",
        {"grpc": Load(8.0), "http": Load(8.0, over_http=True)},
        served,
        ("server_us_per_token",),
        rounds=6,
    ),
    "host_path": Pair(
        "What the host side of a server carries, by how long a step of 64 rows lasts.",
        {f"{step_ms:g} ms": Load(step_ms) for step_ms in (16.0, 8.0, 4.0, 2.0)},
        served,
        ("tokens_per_s",),
        rounds=3,
    ),
    "peers": Pair(
        "Servers of OpenAI's completions under 1 to 64 streams: 128 random tokens in, 128 out.",
        {"jmoe": "http://127.0.0.1:8000", "vllm": "http://127.0.0.1:8100"},
        peers,
        [f"{streams}: {figure}" for streams in STREAMS for figure in PEER_FIGURES],
        rounds=5,
    ),
    "prefix_reuse": Pair(
        "What prefix reuse saves, and what it costs where nothing is shared.",
        {reuse: {"prefix_reuse": reuse} for reuse in ("off", "on")},
        prefixes,
        ("ttft_mean_s", "ttft_p90_s", "tokens_per_s"),
        rounds=5,
    ),
    "page_size": Pair(
        "What small pages cost, with a shared beginning and without.",
        {f"{size} tokens": {"page_size": size} for size in (64, 16)},
        prefixes,
        ("tokens_per_s", "cpu_us_per_token"),
        rounds=5,
    ),
    "structured": Pair(
        "What the masks of structured outputs cost a decode step of 64 rows.",
        _OUTPUTS,
        outputs,
        ("step_ms",),
        rounds=5,
        against=_MASKED,
    ),
    "preemption": Pair(
        "What steps in parts cost best effort, and how long a prompt waits for the device.",
        {"whole": 24, "parts": 0},
        parts,
        ("tokens_per_s", "wait_p50_ms", "wait_p99_ms"),
        rounds=3,
    ),
    "step_time": Pair(
        "A decode step of 64 rows at context 64, without and with brownout.",
        {
            "zero": (100, 0),
            "way 8, t 40": (40, 2),
            "way 8, t 0": (0, 2),
            "full, t 0": (0, 1),
        },
        decode,
        ("step_ms",),
        rounds=20,
    ),
    "plans": Pair(
        "A decode step of 64 rows by which experts stay exact, at equal active experts; and what a "
        "strategy of one's own costs: one that degrades nothing.",
        {
            "visits, t 40": ("float32", "none", Brownout("partial", 40, WAY)),
            "weight, t 40": ("float32", "none", Brownout("partial", 40, WAY, "weight")),
            "weight, level 40": ("float32", "none", Brownout("partial", 40, WAY, "weight", True)),
            "zero": ("float32", "none", None),
            "own, nothing degraded": ("float32", "none", Brownout(LowestGate(), 99)),
        },
        formats,
        ("step_ms", "cpu_ms", "active_experts"),
        rounds=60,
        against=[
            ("weight, t 40", "visits, t 40"),
            ("weight, level 40", "visits, t 40"),
            ("own, nothing degraded", "zero"),
        ],
    ),
    "burst_loss": Pair(
        "What the demo's burst costs its answers: by the paper's plan and controller, and today's.",
        {
            "no brownout": None,
            "the paper's": {"keep": "visits", "controller": "algorithm2"},
            "today's": {},
        },
        bursts,
        ("loss, millinats", "degraded_share"),
        rounds=4,
        against=[("today's", "the paper's")],
    ),
    "burst_levels": Pair(
        "What it costs them with today's thresholds by layer.",
        _IN_LEVELS,
        partial(bursts, levels=True),
        ("loss, millinats", "late_share", "degraded_share"),
        rounds=5,
    ),
    "burst_replayed": Pair(
        "The same on simulated time, whose steps the model computes.",
        _IN_LEVELS,
        replays,
        ("loss, millinats", "late_share", "degraded_share"),
        rounds=20,
    ),
    "kv_cache": Pair(
        "Steps over KV pages in float32 and in fp8: decode, and prefill of one row's context.",
        {
            f"{dtype}, {rows} rows of {context}": (rows, context, given)
            for rows, context in ((64, 64), (16, 500))
            for dtype, given in (("float32", "auto"), ("fp8", "fp8"))
        },
        caches,
        ("decode_ms", "prefill_ms"),
        rounds=20,
        against=[
            (f"fp8, {rows} rows of {context}", f"float32, {rows} rows of {context}")
            for rows, context in ((64, 64), (16, 500))
        ],
    ),
    "formats": Pair(
        "A decode step of 64 rows by what experts are kept in, without brownout and with.",
        {
            f"{name}{', t 40' if brownout else ''}": (dtype, quantize, brownout)
            for brownout in (None, Brownout("partial", 40, WAY))
            for name, (dtype, quantize) in _KEPT.items()
        },
        formats,
        ("step_ms", "cpu_ms"),
        rounds=12,
        against=[
            (f"{name}{at}", f"bfloat16{at}") for at in ("", ", t 40") for name in list(_KEPT)[1:]
        ],
    ),
    "expert_op": Pair(
        "The routed-expert op: 256 visits spread over fewer and fewer experts.",
        {f"{active} experts": active for active in (60, 46, 30, 16, 8, 4)},
        expert_op,
        ("us",),
        rounds=20,
    ),
}
