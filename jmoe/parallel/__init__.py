"""Experts spread over a mesh: who hosts which, who computes which visit, what the next layer needs.

`placement` says which device's pool holds an expert. The next layer's router, or a `probe`, guesses
its visits; `pallas_kernels.planning` turns guesses into replicas and real visits into shares, and
`replicas` names a device for each visit. All of it is plain functions on arrays that every device
can repeat from the same gathered bits (Libra, Algorithms 1 and 2).
"""
