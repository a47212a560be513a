"""Lets EleutherAI's lm-evaluation-harness evaluate a running server.

`python -m serving.bench.lm_eval_adapter --model jmoe --model_args address=HOST:PORT --tasks ...` in
an environment that has `lm_eval` and `grpcio`; docs/evaluation.md has the commands.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.bench.scorer import Progress, Scorer

_MAX_GEN_TOKS = 256  # the harness's own default


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the harness's generation options to fields of `SamplingParams`.

    Raises ValueError for an option that the server does not have.
    """
    left = dict(options)
    until = left.pop("until", None) or ()
    stop = [until] if isinstance(until, str) else [text for text in until if text]
    found: dict[str, Any] = {"stop": stop, "max_new_tokens": _MAX_GEN_TOKS}
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        if name in left:
            found["max_new_tokens"] = int(left.pop(name))
    temperature, sampled = left.pop("temperature", None), left.pop("do_sample", None)
    if sampled is None:
        sampled = bool(temperature)
    if sampled:
        found["temperature"] = 1.0 if temperature is None else float(temperature)
    for name, kind in (("top_p", float), ("top_k", int), ("seed", int)):
        if left.get(name) is not None:
            value = kind(left.pop(name))
            if sampled:
                found[name] = value
    unknown = sorted(name for name, value in left.items() if value is not None)
    if unknown:
        raise ValueError(
            f"the server has no generation option {', '.join(unknown)}; it has until, "
            "max_gen_toks, do_sample, temperature, top_p, top_k and seed"
        )
    return found


def register() -> Any:
    """Registers `jmoe` as a model of the harness, and returns its class.

    Raises ImportError without the harness.
    """
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]

    @register_model("jmoe")
    class JmoeServer(LM):
        """A running server; takes the arguments of `Scorer`."""

        def __init__(
            self,
            address: str = "127.0.0.1:50051",
            batch_size: Any = None,  # these three are the harness's own
            max_batch_size: Any = None,
            device: Any = None,
            **arguments: Any,
        ) -> None:
            super().__init__()
            self.scorer = Scorer(address, **arguments)

        def _run(self, work: Callable[..., list[Any]], requests: Sequence[Any], what: str) -> Any:
            inputs = [request.args for request in requests]
            with tqdm(total=len(inputs), desc=what) as bar:
                return work(inputs, lambda: bar.update(1))

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return self._run(self.scorer.loglikelihood, requests, "loglikelihood")

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            def work(inputs: Sequence[tuple[str]], progress: Progress) -> list[float]:
                return self.scorer.loglikelihood_rolling([text for (text,) in inputs], progress)

            return self._run(work, requests, "loglikelihood_rolling")

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            def work(inputs: Sequence[tuple[str, Any]], progress: Progress) -> list[str]:
                prepared = [(context, sampling_of(options)) for context, options in inputs]
                return self.scorer.generate_until(prepared, progress)

            return self._run(work, requests, "generate_until")

        def get_model_info(self) -> dict[str, Any]:
            """Returns facts that the harness stores with the results."""
            state, scorer = self.scorer.brownout, self.scorer
            return {
                "served_model": scorer.model,
                "brownout_strategy": state.strategy if scorer.allow_brownout else "zero",
                "brownout_way": state.way,
                "prefill_threshold_percent": state.prefill_threshold_percent,
                "decode_threshold_percent": state.decode_threshold_percent,
                "salc_enabled": state.salc_enabled,
                "expert_visits": scorer.expert_visits,
                "degraded_visits": scorer.degraded_visits,
            }

    return JmoeServer


def main() -> None:
    """Runs the harness's own command line, with `--model jmoe` registered."""
    try:
        register()
    except ImportError as error:
        print(
            f"jmoe: {error}; install lm-eval in an environment of its own (docs/evaluation.md)",
            file=sys.stderr,
        )
        sys.exit(2)
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()


if __name__ == "__main__":
    main()
