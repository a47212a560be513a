"""The newcomer's clock, on a README whose install makes a server of a few lines."""

import os

import pytest

from benchmarks.first_answer import measure

README = """
```sh
mkdir -p venv/bin
cat > venv/bin/jmoe <<'END'
#!/usr/bin/env python3
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"text":" Bedrin"}')
server = HTTPServer(("127.0.0.1", 0), Handler)
with (Path.home() / "starts").open("a") as starts:
    starts.write(".")
print(f"jmoe http on http://127.0.0.1:{server.server_port}", flush=True)
print("jmoe ready on 127.0.0.1:1", flush=True)
server.serve_forever()
END
chmod +x venv/bin/jmoe
```

```sh
curl -s http://127.0.0.1:8000/v1/completions
```

and the answer's `text` is `"EXPECTED"`.
"""


def test_each_start_is_timed_until_its_answer(tmp_path):
    seconds = measure(README.replace("EXPECTED", " Bedrin"), tmp_path, os.environ)
    waited = [name for name in seconds if not name.endswith("_cpu")]
    assert waited == ["install", "first", "second"]
    assert all(seconds[f"{name}_cpu"] > 0 for name in waited)
    assert (tmp_path / "home" / "starts").read_text() == ".."


def test_another_answer_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"' Elsewhere' was expected.* Bedrin"):
        measure(README.replace("EXPECTED", " Elsewhere"), tmp_path, os.environ)
