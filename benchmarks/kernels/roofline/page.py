"""The predictions as text, and as docs/roofline.md."""

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.harness.store import markdown
from benchmarks.kernels.cases import OPS, Case, Sizes, all_cases
from benchmarks.kernels.roofline import predict
from benchmarks.kernels.roofline.parts import Prediction
from benchmarks.kernels.shapes import MODELS, OTHER_MODELS
from pallas_kernels.backend import traced_for

CATALOGUE = (*MODELS, *OTHER_MODELS)
GRID = Sizes(models=CATALOGUE, quantized_models=CATALOGUE, latent_models=())
PAGE_TOKENS = {"decode": 64, "prefill": 4096}
PAGE_CONTEXT = 8192
"""The context of the page's rows; the command prints every case."""

_SUMMARY = ["op", "phase", "cases", "share, least to most", "largest loss in most cases"]
_CASES = ["op", "model", "tokens", "floor, µs", "expected, µs", "share", "largest loss, µs"]

Row = tuple[Case, Prediction]


def predictions(model: str = "") -> list[Row]:
    """Returns every case of the models whose names hold `model`, op by op."""
    chosen = [case for case in all_cases(GRID) if model.lower() in case.shape.name.lower()]
    with traced_for("cuda"):  # no device is asked for its size
        return [(case, predict(case, GRID)) for case in sorted(chosen, key=_place)]


def _place(case: Case) -> tuple[int | str, ...]:
    model = CATALOGUE.index(case.shape)
    size = case.tokens, case.context, case.window
    return OPS.index(case.op), model, case.phase, *size, case.skew


def text(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of the table, one for each case."""
    yield f"{'case':58} {'floor us':>9} {'expected':>9} {'share':>6}  largest loss"
    for case, of in rows:
        floor, expected, share, loss = _times(of)
        yield f"{case.name:58} {floor:>9} {expected:>9} {share:>6}  {loss} {of.note}".rstrip()


def _times(of: Prediction) -> list[str]:
    loss = f"{of.largest_loss}, {_number(of.losses[of.largest_loss])}"
    return [_number(of.floor_us), _number(of.us), f"{of.share:.0%}", loss]


def _number(value: float) -> str:
    """Returns a number with three digits and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value else "0"


# ---- The page ----


def page() -> str:
    """Returns the whole text of docs/roofline.md."""
    rows = predictions()
    cases = [
        [case.op, _model(case), str(case.tokens), *_times(of)]
        for case, of in rows
        if _is_on_page(case)
    ]
    tables = markdown(_SUMMARY, [*_summary(rows)]), markdown(_CASES, cases)
    return _PAGE.format(*map("\n".join, tables))


def _model(case: Case) -> str:
    return case.shape.name + f", window {case.window:,}" * (case.window > 0)


def _is_on_page(case: Case) -> bool:
    usual = case.shape in MODELS and case.tokens == PAGE_TOKENS[case.phase]
    return usual and case.context in (0, PAGE_CONTEXT) and case.skew in ("", "uniform")


def _summary(rows: Sequence[Row]) -> Iterator[list[str]]:
    for op in OPS:
        for phase in ("decode", "prefill"):
            own = [of for case, of in rows if (case.op, case.phase) == (op, phase)]
            if not own:
                continue
            shares = [of.share for of in own]
            [(loss, number)] = Counter(of.largest_loss for of in own).most_common(1)
            spread = f"{min(shares):.0%} to {max(shares):.0%}"
            yield [op, phase, str(len(own)), spread, f"{loss} ({number})"]


_PAGE = """# Roofline of the kernels

Made by `python -m benchmarks.kernels.roofline --page docs/roofline.md`; change
`benchmarks/kernels/roofline`, not this page. The command needs no GPU; without `--page` it prints
every case of the kernel benchmark: every model, batch and skew.

**All of it is arithmetic for an H200. Nothing here was measured.** The kernel benchmark
(`python -m benchmarks.gpu --parts kernels`) keeps expected and measured times side by side.

- **floor**: the larger of the bytes that no version of the op can do without (for the grouped GEMM:
  weights) over the copy rate, and the operations over the product rate. **expected**: the floor
  plus losses, computed from the tile that the op chooses. **share**: the floor in it.
- Gaps between kernels, page-table walks, bank conflicts and what ptxas makes of a loop have no
  number here. On another GPU, the kernel benchmark takes that one's rates (`DEVICES`).
- Rows of experts are one draw of a uniform router. Masks of windows have no number.

## What is lost, by op

{}

## 64 rows of decode, 4,096 tokens of prefill
Attention at a context of 8,192 tokens.

{}

## Assumptions
`benchmarks/mesh/rates.py` has the rates, 4.3 TB/s of copies and 790 TFLOP/s of products, and
`benchmarks/kernels/roofline/assumptions.py` all else, such as 1.5 us a launch; both name their
sources. Published beside them: FlashAttention-3's 661 TFLOP/s at head size 128 without a mask, 582
without its overlap. For grouped products in bfloat16 no figure at these sizes was found: what is
expected of them is a bound, no forecast.
"""
