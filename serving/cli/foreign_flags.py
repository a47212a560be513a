"""Flags of `vllm serve` and of SGLang's server: what does the same in `jmoe serve`."""

from collections.abc import Iterable
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

_MESH = "--mesh ep=N, which spreads experts and requests over N devices"
_NO_TP = f"jmoe splits no matrix over devices; use {_MESH}"
_CHUNKS = "prompts always run in chunks, of --max-prefill-tokens at most"
_CODE = "jmoe runs no code of a model's directory; docs/new-architecture.md adds an architecture"
_EAGER = "--set engine.enforce_eager=true"
_GRAPHS = "--set engine.decode_buckets=8,32,64, the batch sizes that are compiled"
_NO_LORA = "jmoe loads no adapters; docs/families.md serves several merged fine-tunes"
_NO_SPECULATION = "jmoe has no speculative decoding"
_PARSER = "tools are parsed wherever the chat template has them"
_SPARE = "--set engine.balance.spare_slots=N, over a mesh"
_STRUCTURE = "jmoe has one implementation of structured outputs, which is always on"
_TOKENIZER = "the tokenizer is that of the model's directory"

ADVICE = {
    "--api-base": "the API is under /v1 of --http-port",
    "--api-key": "`jmoe keys new NAME --file FILE`, and --keys-file FILE",
    "--attention-backend": "kernels are chosen by device (docs/kernels.md)",
    "--chunked-prefill-size": "--max-prefill-tokens N",
    "--compilation-config": _GRAPHS,
    "--cpu-offload-gb": "only a family's experts can be in host memory (docs/families.md)",
    "--cuda-graph-max-bs": _GRAPHS,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--data-parallel-size": _MESH,
    "-dp": _MESH,
    "--dp": _MESH,
    "--dp-size": _MESH,
    "--disable-cuda-graph": _EAGER,
    "--disable-log-requests": "requests are logged with --verbose only",
    "--disable-log-stats": "--status-interval-s 0",
    "--disable-radix-cache": "--set engine.prefix_reuse=off",
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
    "--enforce-eager": _EAGER,
    "--ep": "--mesh ep=N",
    "--ep-size": "--mesh ep=N",
    "--expert-parallel-size": "--mesh ep=N",
    "--grammar-backend": _STRUCTURE,
    "--guided-decoding-backend": _STRUCTURE,
    "--structured-outputs-config": _STRUCTURE,
    "--hf-overrides": "edit config.json, or --allow-unknown-config KEY",
    "--hf-token": "HF_TOKEN of the environment",
    "--kv-transfer-config": "jmoe moves no KV pages between servers",
    "--limit-mm-per-prompt": "jmoe serves text only",
    "--load-format": "jmoe reads safetensors, and has no dummy weights",
    "--log-level": "--verbose, which logs every request",
    "--uvicorn-log-level": "--verbose, which logs every request",
    "--max-logprobs": "it is always 20; --set engine.max_logprobs_per_call=N limits a call's",
    "--max-num-batched-tokens": "--max-prefill-tokens N",
    "--mem-fraction-static": "--memory-fraction 0.9, which has the steps' memory in it, too",
    "--model-path": "--model DIR",
    "--nnodes": "--num-processes N",
    "--node-rank": "--process-index N",
    "--num-gpu-blocks-override": "--num-pages N",
    "--num-redundant-experts": _SPARE,
    "--ep-num-redundant-experts": _SPARE,
    "--otlp-traces-endpoint": "--set otlp_endpoint=URL",
    "--pipeline-parallel-size": f"jmoe splits no layers over devices; use {_MESH}",
    "-pp": f"jmoe splits no layers over devices; use {_MESH}",
    "--quantization": "--quantize fp8, int4 or mxfp4; checkpoints that are quantized need no flag",
    "--root-path": "jmoe has no such prefix; let the proxy strip it",
    "--schedule-policy": "--policy ls_first, fcfs, edf or qllm",
    "--sampling-defaults": "--generation-config auto or none",
    "--scheduling-policy": "--policy ls_first, fcfs, edf or qllm",
    "--seed": "each request has its own `seed`",
    "--random-seed": "each request has its own `seed`",
    "--speculative-algorithm": _NO_SPECULATION,
    "--speculative-config": _NO_SPECULATION,
    "--ssl-ca-certs": "--tls-client-ca FILE, with which every client needs a certificate",
    "--swap-space": "preempted requests are computed again, not swapped",
    "--tensor-parallel-size": _NO_TP,
    "-tp": _NO_TP,
    "--tp": _NO_TP,
    "--tp-size": _NO_TP,
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--tokenizer-path": _TOKENIZER,
    "--trust-remote-code": _CODE,
}
"""What to do in place of each other flag of theirs: jmoe's flag or setting, or why it has none."""

CLOSE = 0.85
"""How alike names have to be for a hint: a letter or two amiss, or words joined otherwise."""


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
