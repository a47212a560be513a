"""A family of three tiny models on the real engine, and requests for any of them."""

from pathlib import Path

from serving.config import AsynchronousConfig, BrownoutConfig, EngineConfig
from serving.request import Priority, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"
LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
NAMES = ("base", "law", "code")


def settings_of(directories, cache, **changes):
    given = {
        "models": tuple(f"{name}={path}" for name, path in directories.items()),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 48,
        "page_size": 8,
        "reserved_ls_seqs": 2,
        "num_pages": 36,
        "max_prefill_tokens": 16,
        "max_prefill_seqs": 4,
        "decode_buckets": (4,),
        "prefill_buckets": (16,),
        "threshold_buckets_percent": (100,),
        "compilation_cache": cache,
        "part_layers": 1,
        "mixed_models": 0,
        "brownout": BrownoutConfig(strategy="zero", salc=False),
        **changes,
    }
    return EngineConfig(**given)


AEP = {
    "model": str(GOLDEN),
    "mode": "aep",
    "asynchronous": AsynchronousConfig(attention=2, experts=3, copies=2),
    "max_num_seqs": 6,
    "page_size": 4,
    "part_layers": 0,
    "threshold_buckets_percent": (),
}
"""A model of theirs on asynchronous workers: changes of `settings_of`."""


async def answer(engine, prompt, sampling, model="", **options):
    tokens, logprobs, degraded = [], [], 0
    async for out in engine.generate(prompt, sampling, model=model, **options):
        tokens += out.token_ids
        logprobs += out.logprobs
        degraded = out.usage.degraded_visits
    return tokens, logprobs, degraded


def requests(rng, count, *, prompt_below=24, fewest=1, below=14):
    """Draws (prompt, sampling, model, priority) of each request; `fewest` tokens or more, less than
    `below`.
    """
    for _ in range(count):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, prompt_below))]
        sampling = SamplingParams(
            max_new_tokens=rng.randrange(fewest, below),
            temperature=rng.choice((0.0, 0.7)),
            seed=rng.randrange(100),
            ignore_eos=True,
            logprobs=True,
        )
        yield prompt, sampling, rng.choice(NAMES), rng.choice((LS, BE))
