"""When asynchronous expert parallelism beats synchronous, and by how much, event by event.

The schedulers are the server's own (`serving.scheduling.layers`). What a stage takes follows from
sizes and a machine's rates, or from a file of measured times. Nothing here was run on a GPU.
"""
