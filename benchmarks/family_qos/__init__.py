"""How well several models on one machine are served: from one pool, in turn, or side by side."""

import os

# Read when grpc is imported, which would tell of every server that is started.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
