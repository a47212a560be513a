"""What is measured: every op at every size, what it has to move and compute, and its target."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.kernels.shapes import (
    EXPANDED,
    LATENT_MODELS,
    MODELS,
    QWEN3_30B_A3B,
    QWEN15_MOE_A27B,
    Shape,
)

OPS = (
    "grouped_gemm",
    "paged_attention",
    "prefill_attention",
    "routing",
    "kv_write",
    "grouped_gemm_fp8",
    "grouped_gemm_int4",
)
WEIGHT_BYTES = {"grouped_gemm": 2.0, "grouped_gemm_fp8": 1.0, "grouped_gemm_int4": 19 / 32}
"""Of the grouped GEMMs. A group of 32 weights in int4 has 3 bytes of scale and zero point."""
ATTENTION_OPS = ("paged_attention", "prefill_attention", "kv_write")
"""Of these a model with latents has no case of the last: no kernel writes its pages."""
SKEWS = ("uniform", "exponential")
_SKEWS = {"grouped_gemm": SKEWS, "grouped_gemm_fp8": SKEWS[:1], "grouped_gemm_int4": SKEWS[:1]}


def weight_bits(weight_bytes: float) -> int:
    """Returns the bits of a weight that takes so many bytes with its part of a group's scale."""
    return 4 if weight_bytes < 1 else round(8 * weight_bytes)


@dataclass(frozen=True)
class Sizes:
    """The grid of one run. The defaults are the full one."""

    models: tuple[Shape, ...] = MODELS
    quantized_models: tuple[Shape, ...] = MODELS  # whole blocks of 128 by 128
    latent_models: tuple[Shape, ...] = LATENT_MODELS  # of which attention alone is measured
    decode_tokens: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prefill_tokens: tuple[int, ...] = (1024, 4096, 16384)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    page_size: int = 64
    rotated_bytes: int = 160 << 20  # input sets are rotated over this much: L2 is 60 MB
    kv_bytes: int = 8 << 30  # pages beyond this are shared between sequences


DRY = Sizes(
    models=(Shape("tiny", 16, 8, 4, 2, 4, 2, 8, 8, window=5),),
    quantized_models=(Shape("tiny blocks", 128, 128, 4, 2, 4, 2, 8, 128),),
    latent_models=(Shape("tiny latents", 16, 8, 4, 2, 4, 1, 12, latent=8),),
    decode_tokens=(4,),
    prefill_tokens=(8,),
    contexts=(8, 16),
    page_size=4,
    rotated_bytes=0,
    kv_bytes=1 << 20,
)
"""For a machine without a GPU: what is checked there is the harness."""


@dataclass(frozen=True)
class Case:
    """One op at one size. `tokens` is the decode batch or the rows of a prefill step."""

    op: str
    shape: Shape
    phase: str
    tokens: int
    context: int = 0  # KV positions a sequence, for the attention ops
    skew: str = ""  # of the router, for the grouped GEMMs
    window: int = 0  # positions that a row sees, for the attention ops; 0: all

    @property
    def name(self) -> str:
        """Key of the case in what is stored."""
        parts = [self.op, self.shape.name, self.phase, f"t{self.tokens}"]
        parts += [f"c{self.context}"] * (self.context > 0) + [self.skew] * bool(self.skew)
        parts += [f"w{self.window}"] * (self.window > 0)
        return "/".join(parts)

    def chunks(self) -> list[tuple[int, int]]:
        """Returns (rows, KV positions) of each sequence of an attention op.

        Decode: one row a sequence. Prefill: one chunk that ends a context at least as long, or as
        many whole prompts of `context` positions as the rows make.
        """
        if self.phase == "decode":
            return [(1, self.context)] * self.tokens
        rows = min(self.tokens, self.context)
        return [(rows, self.context)] * (self.tokens // rows)


class Count(NamedTuple):
    """What no version of the op can do without."""

    bytes: int  # moved through device memory: each input read once, each output written once
    flops: int


def count_moe_mlp(shape: Shape, active_experts: int, rows: int, itemsize: float = 2.0) -> Count:
    """Counts the weights of the experts that have rows, and three products a row.

    Activations are left out, which makes the share of the bandwidth a lower bound.
    """
    elements = shape.expert_elements
    return Count(round(active_experts * elements * itemsize), 2 * rows * elements)


def _causal_pairs(chunks: Sequence[tuple[int, int]]) -> int:
    return sum(n * (c - n) + n * (n + 1) // 2 for n, c in chunks)


def count_attention(
    shape: Shape, chunks: Sequence[tuple[int, int]], itemsize: int = 2, window: int = 0
) -> Count:
    """Counts causal attention: every key and value that a row may see once, queries in, rows out.

    The i-th of n rows at the end of c positions sees c - n + i + 1 of them, or the last `window`.
    """
    pairs, positions = _causal_pairs(chunks), sum(c for _, c in chunks)
    if window:
        behind = (range(max(0, c - n + 1 - window), max(0, c + 1 - window)) for n, c in chunks)
        unseen = [(sum(some), some.start) for some in behind]
        pairs -= sum(pairs for pairs, _ in unseen)
        positions -= sum(first for _, first in unseen)
    of_key_and_value = shape.head_dim + (shape.latent or shape.head_dim)
    kv = positions * shape.kv_heads * (shape.head_dim if shape.latent else of_key_and_value)
    rows = sum(n for n, _ in chunks) * shape.heads * of_key_and_value
    return Count((kv + rows) * itemsize, 2 * pairs * shape.heads * of_key_and_value)


def count_expanded(shape: Shape, chunks: Sequence[tuple[int, int]]) -> Count:
    """Counts causal attention over latents that keys and values are made of, once a position and
    head; queries in, rows out, and weights once.
    """
    pairs, rows = _causal_pairs(chunks), sum(n for n, _ in chunks)
    positions = sum(c for _, c in chunks)
    of_row = shape.heads * (EXPANDED.key + EXPANDED.value)
    made = shape.heads * (EXPANDED.key - (shape.head_dim - shape.latent) + EXPANDED.value)
    moved = positions * shape.head_dim + shape.latent * made + rows * of_row
    return Count(2 * moved, 2 * (pairs * of_row + positions * shape.latent * made))


def count_kv_write(shape: Shape, tokens: int) -> Count:
    """Counts each token's query, key and value heads, read and written, and its float32 angles."""
    heads = shape.heads + 2 * shape.kv_heads
    return Count(tokens * shape.head_dim * (4 * heads + 4), 0)


class Target(NamedTuple):
    """The least a figure should be; `figure` names a field of a record's figures."""

    figure: str
    at_least: float


def target(case: Case) -> Target | None:
    """Returns the project's target for this case on an H200; None where it has none."""
    if case.op == "grouped_gemm" and case.phase == "decode" and 32 <= case.tokens <= 256:
        return Target("share_of_copy", 0.95)
    if case.op == "grouped_gemm" and case.tokens == 16384:
        small = case.shape in (QWEN15_MOE_A27B, QWEN3_30B_A3B)
        return Target("tflop_s", 500.0 if small else 650.0)
    if case.window:
        return None
    decode = case.op == "paged_attention" and not case.shape.latent
    if decode and case.tokens * case.context >= 128 * 1024:
        return Target("tb_s", 4.0)
    prefill = case.op == "prefill_attention" and case.shape.head_dim == 128
    if prefill and case.tokens == 16384 and case.context >= 16384:
        return Target("tflop_s", 620.0)
    return None


def all_cases(sizes: Sizes) -> list[Case]:
    """Returns every case, those with a target first; a model's cases of an op lie together.

    Time on a GPU may end before the list does, and weights should be drawn once.
    """
    cases = []
    for op in OPS:
        is_quantized = WEIGHT_BYTES.get(op, 2) < 2
        shapes = sizes.quantized_models if is_quantized else sizes.models
        shapes += sizes.latent_models * (op in ATTENTION_OPS[:2])
        cases += [case for shape in shapes for case in _cases_of(op, shape, sizes)]
    return sorted(cases, key=lambda case: target(case) is None)


def with_one_router(sizes: Sizes) -> list[Case]:
    """Returns every case, each op's with the most skewed of the routers that it is tried with."""
    return [case for case in all_cases(sizes) if case.skew == _SKEWS.get(case.op, ("",))[-1]]


def _cases_of(op: str, shape: Shape, sizes: Sizes) -> Iterator[Case]:
    decode, prefill = sizes.decode_tokens, sizes.prefill_tokens
    if op == "kv_write" and shape.latent:
        return
    if op == "paged_attention":
        for tokens in decode:
            yield from _over_windows(op, shape, "decode", tokens, sizes.contexts)
    elif op == "prefill_attention":
        for tokens in prefill:
            yield from _over_windows(op, shape, "prefill", tokens, {*sizes.contexts, tokens})
    else:
        steps = [("decode", t) for t in decode] + [("prefill", t) for t in prefill]
        for phase, tokens in steps:
            for skew in _SKEWS.get(op, ("",)):
                yield Case(op, shape, phase, tokens, 0, skew)


def _over_windows(
    op: str, shape: Shape, phase: str, tokens: int, contexts: Collection[int]
) -> Iterator[Case]:
    for context in sorted(contexts):
        yield Case(op, shape, phase, tokens, context)
        if 0 < shape.window < context:
            yield Case(op, shape, phase, tokens, context, window=shape.window)
