"""Simulates mixture-of-experts layers on many devices, and reckons what they cost.

`aep` plays asynchronous beside synchronous expert parallelism, with the server's own schedulers
(`serving.scheduling.layers`), and `forecast` holds the forecasts of `jmoe.parallel.asynchronous` to
it. `balance` and `drift` measure how evenly devices are loaded, `libra` fits Libra's published
times. `rates` has what machines are taken to do, `papers.json` what papers print. No GPU is needed.
"""
