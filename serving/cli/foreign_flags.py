"""Flags of `vllm serve` and of SGLang's server: what does the same in `jmoe serve`."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

ALIASES = {
    "--page-size": ("--block-size",),
    "--memory-fraction": ("--gpu-memory-utilization",),
    "--hub-revision": ("--revision",),
    "--tls-cert": ("--ssl-certfile",),
    "--tls-key": ("--ssl-keyfile",),
    "--max-model-len": ("--context-length",),
    "--max-num-seqs": ("--max-running-requests",),
    "--max-queue-len": ("--max-queued-requests",),
}
"""Flags of vLLM or SGLang that mean the same and take the same values, by jmoe's flag."""

VALUES = {
    "--dtype": {"auto": "bfloat16", "half": "float16", "float": "float32"},
    "--generation-config": {"vllm": "none"},
    "--max-model-len": {"auto": "0", "-1": "0"},
    "--context-length": {"auto": "0", "-1": "0"},
}
"""Values of vLLM's, by flag, and jmoe's that mean the same."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")
"""A count as vLLM takes it: 1k is 1000, 1K 1024, and likewise m and M, g and G."""

_MESH = "--mesh ep=N, which spreads experts and requests over N devices"
_NO_TP = f"jmoe splits no matrix over devices; use {_MESH}"
_CHUNKS = "prompts always run in chunks, of --max-prefill-tokens at most"
_CODE = "jmoe runs no code of a model's directory; docs/new-architecture.md adds an architecture"
_EAGER = "--set engine.enforce_eager=true"
_GRAPHS = "--set engine.decode_buckets=8,32,64, the batch sizes that are compiled"
_NO_IMAGES = "jmoe serves text only"
_IN_CONFIG = "edit config.json"
_LOGS = "requests are logged with --verbose only"
_NO_LORA = "jmoe loads no adapters; docs/families.md serves several merged fine-tunes"
_NO_SPECULATION = "jmoe has no speculative decoding"
_PARSER = "tools are parsed wherever the chat template has them"
_SPARE = "--set engine.balance.spare_slots=N, over a mesh"
_STRUCTURE = "jmoe has one implementation of structured outputs, which is always on"
_TOKENIZER = "the tokenizer is that of the model's directory"

ADVICE = {
    "--api-base": "the API is under /v1 of --http-port",
    "--api-key": "`jmoe keys new NAME --file FILE`, and --keys-file FILE",
    "--all2all-backend": "experts are exchanged as --mesh and docs/expert-parallelism.md say",
    "--api-server-count": "one process serves HTTP; several servers stand behind a proxy",
    "--async-scheduling": "it is always on: a step is planned while another runs",
    "--no-async-scheduling": "it cannot be turned off",
    "--attention-backend": "kernels are chosen by device (docs/kernels.md)",
    "--chat-template-content-format": "templates get the text of a message's parts",
    "--chunked-prefill-size": "--max-prefill-tokens N",
    "--code-revision": _CODE,
    "--compilation-config": _GRAPHS,
    **{f"-O{level}": _GRAPHS for level in ("", *range(4))},
    "--cpu-offload-gb": "only a family's experts can be in host memory (docs/families.md)",
    "--cuda-graph-max-bs": _GRAPHS,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--data-parallel-size": _MESH,
    "-dp": _MESH,
    "--dp": _MESH,
    "--dp-size": _MESH,
    "--disable-cuda-graph": _EAGER,
    "--device": "JAX_PLATFORMS=cpu or cuda of the environment",
    "--disable-log-requests": _LOGS,
    "--disable-uvicorn-access-log": _LOGS,
    "--no-enable-log-requests": _LOGS,
    "--disable-log-stats": "--status-interval-s 0",
    "--disable-radix-cache": "--set engine.prefix_reuse=off",
    "--disable-sliding-window": "config.json says which layers have a window",
    "--dist-init-addr": "--coordinator HOST:PORT",
    "--distributed-executor-backend": "--coordinator, --num-processes and --process-index",
    "--download-dir": "HF_HOME of the environment",
    "--enable-auto-tool-choice": f"it is always on: {_PARSER}; --tool-call-parser names a format",
    "--enable-chunked-prefill": f"it is always on: {_CHUNKS}",
    "--no-enable-chunked-prefill": f"it cannot be turned off: {_CHUNKS}",
    "--enable-eplb": f"it is on by itself on GPUs; {_SPARE}",
    "--enable-expert-parallel": "--mesh ep=N",
    "--enable-log-requests": "--verbose",
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--lora-paths": _NO_LORA,
    "--enable-metrics": "--metrics-port PORT",
    "--enable-mixed-chunk": "--set engine.hybrid_steps=on",
    "--enable-prefix-caching": "it is always on; --set engine.prefix_reuse=off turns it off",
    "--no-enable-prefix-caching": "--set engine.prefix_reuse=off",
    "--enable-prompt-tokens-details": "they are always there",
    "--enable-sleep-mode": "jmoe does not sleep; stop it and start it again",
    "--enforce-eager": _EAGER,
    "--ep": "--mesh ep=N",
    "--ep-size": "--mesh ep=N",
    "--expert-parallel-size": "--mesh ep=N",
    "--grammar-backend": _STRUCTURE,
    "--guided-decoding-backend": _STRUCTURE,
    "--structured-outputs-config": _STRUCTURE,
    "--hf-overrides": "edit config.json, or --allow-unknown-config KEY",
    "--hf-token": "HF_TOKEN of the environment",
    "--kv-cache-memory-bytes": "--num-pages N",
    "--kv-transfer-config": "jmoe moves no KV pages between servers",
    "--language-model-only": f"it is always so: {_NO_IMAGES}",
    "--limit-mm-per-prompt": _NO_IMAGES,
    "--mm-processor-cache-gb": _NO_IMAGES,
    "--load-format": "jmoe reads safetensors, and has no dummy weights",
    "--log-level": "--verbose, which logs every request",
    "--uvicorn-log-level": "--verbose, which logs every request",
    "--max-logprobs": "it is always 20; --set engine.max_logprobs_per_call=N limits a call's",
    "--max-num-batched-tokens": "--max-prefill-tokens N",
    "--mem-fraction-static": "--memory-fraction 0.9, which has the steps' memory in it, too",
    "--model-impl": "jmoe has one implementation of each architecture",
    "--model-path": "--model DIR",
    "--moe-backend": "kernels are chosen by device (docs/kernels.md)",
    "--nnodes": "--num-processes N",
    "--node-rank": "--process-index N",
    "--num-gpu-blocks-override": "--num-pages N",
    "--num-redundant-experts": _SPARE,
    "--ep-num-redundant-experts": _SPARE,
    "--otlp-traces-endpoint": "--set otlp_endpoint=URL",
    "--override-generation-config": "edit generation_config.json, or --generation-config none",
    "--pipeline-parallel-size": f"jmoe splits no layers over devices; use {_MESH}",
    "-pp": f"jmoe splits no layers over devices; use {_MESH}",
    "--quantization": "--quantize fp8, int4 or mxfp4; checkpoints that are quantized need no flag",
    "-q": "--quantize fp8, int4 or mxfp4; checkpoints that are quantized need no flag",
    "--rope-scaling": _IN_CONFIG,
    "--rope-theta": _IN_CONFIG,
    "--root-path": "jmoe has no such prefix; let the proxy strip it",
    "--runner": "jmoe generates text, and nothing else",
    "--schedule-policy": "--policy ls_first, fcfs, edf or qllm",
    "--sampling-defaults": "--generation-config auto or none",
    "--scheduling-policy": "--policy ls_first, fcfs, edf or qllm",
    "--seed": "each request has its own `seed`",
    "--random-seed": "each request has its own `seed`",
    "--speculative-algorithm": _NO_SPECULATION,
    "--speculative-config": _NO_SPECULATION,
    "--ssl-ca-certs": "--tls-client-ca FILE, with which every client needs a certificate",
    "--swap-space": "preempted requests are computed again, not swapped",
    "--task": "jmoe generates text, and nothing else",
    "--tensor-parallel-size": _NO_TP,
    "-tp": _NO_TP,
    "--tp": _NO_TP,
    "--tp-size": _NO_TP,
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--tokenizer-path": _TOKENIZER,
    "--trust-remote-code": _CODE,
    "--uds": "jmoe listens on TCP: --host HOST and --http-port PORT",
}
"""What to do in place of each other flag of theirs: jmoe's flag or setting, or why it has none."""

CLOSE = 0.85
"""How alike names have to be for a hint: a letter or two amiss, or words joined otherwise."""


def in_own_words(arguments: Sequence[str]) -> list[str]:
    """Returns a command line with flags and their values as vLLM writes them, too, as jmoe does."""
    found, flag = list[str](), ""
    for argument in arguments:
        name, joined, value = argument.partition("=")
        name = name.replace("_", "-") if argument.startswith("--") else name
        if not joined and not argument.startswith("--"):
            name, value = flag, argument
        own = VALUES.get(name, {}).get(value, value)
        if name in ("--max-model-len", "--context-length") and (count := _COUNT.fullmatch(own)):
            base = 1024 if count[2].isupper() else 1000
            own = str(int(float(count[1]) * base ** ("kmg".index(count[2].lower()) + 1)))
        if argument.startswith("--"):
            found.append(f"{name}={own}" if joined else name)
            flag = "" if joined else name
        else:
            found.append(own if name == flag else argument)
            flag = ""
    return found


def advice(name: str, known: Iterable[str]) -> str:
    """Returns what to do in place of an unknown flag, of those `known`; "" if nothing fits."""
    name = name.replace("_", "-").partition(".")[0]  # vLLM's parser takes both
    if said := ADVICE.get(name):
        return f"use {said}" if said.startswith(("-", "`")) else said
    return similar(name, known)


def similar(name: str, known: Iterable[str]) -> str:
    """Returns a hint to a flag that is called nearly like `name`, or "" if none is."""
    near = get_close_matches(name, [flag for flag in known if flag.startswith("--")], 1, CLOSE)
    return f"did you mean {near[0]}?" if near else ""
