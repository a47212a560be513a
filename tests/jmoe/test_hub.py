"""Models of the Hub: from a cache laid out as huggingface_hub does, and from a small Hub here."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

import jmoe
from jmoe import hub
from jmoe.api import name_of, resolve
from jmoe.config import ConfigError
from jmoe.tokenizer import Tokenizer
from serving.config import EngineConfig, ServerConfig
from serving.errors import SettingsError
from serving.frontend.server import Server
from serving.startup.loading import load_models
from serving.startup.prepare import prepare

ROOT = Path(__file__).parents[2]
BUNDLED = resolve("bundled")
COMMIT, OLDER = "c" * 40, "d" * 40
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
BESIDE = {"united.safetensors", "generation_config.json"}


class Hub:
    """As much of the Hub's API as a snapshot needs, for one model, `org/tiny`."""

    def __init__(self, files):
        self.files = {COMMIT: files, OLDER: {**files, "README.md": b"older"}}
        self.revisions = {"main": COMMIT, "v1": OLDER, COMMIT: COMMIT, OLDER: OLDER}
        self.asked, self.token = [], None
        mine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                mine.asked.append(self.path)
                self.answer(*mine.answer(self.path, self.headers.get("authorization")))

            do_HEAD = do_GET

            def answer(self, status, headers, body):
                self.send_response(status)
                for key, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path, authorization):
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"x-error-code": "RepoNotFound"}, b"{}"
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        match parts:
            case ["api", "models", "org", "tiny", *rest]:
                return self.api(rest)
            case ["org", "tiny", "resolve", revision, *name]:
                body = self.files[self.revisions[revision]]["/".join(name)]
                etag = hashlib.sha256(body).hexdigest()
                return 200, {"etag": f'"{etag}"', "x-repo-commit": revision}, body
            case ["api", "models", "org", "gated", *_]:
                return 403, {"x-error-code": "GatedRepo"}, b"{}"
            case _:
                return 404, {"x-error-code": "RepoNotFound"}, b"{}"

    def api(self, rest):
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in self.revisions:
            return 404, {"x-error-code": "RevisionNotFound"}, b"{}"
        commit = self.revisions[revision]
        files = self.files[commit]
        if rest[:1] == ["tree"]:
            found = [
                {"type": "file", "path": name, "size": len(body), "oid": commit}
                for name, body in files.items()
            ]
        else:
            found = {"id": "org/tiny", "sha": commit, "siblings": []}
        return 200, {"content-type": "application/json"}, json.dumps(found).encode()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def bundled_files():
    found = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.is_file()}
    return {name: body for name, body in found.items() if name in FILES or name in BESIDE}


@pytest.fixture
def tiny():
    others = {"consolidated.00.safetensors": b"twice", "pytorch_model.bin": b"pickles"}
    hub = Hub({**bundled_files(), **others})
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Returns an empty cache, without a Hub to ask."""
    hub._snapshot.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ask("http://127.0.0.1:9", monkeypatch)
    return tmp_path / "cache"


def ask(url, monkeypatch):
    """Points the library to a Hub as HF_ENDPOINT does, which is read at import."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def online(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ask(hub.url, monkeypatch)


def lay_out(cache, commit=COMMIT, revision="main"):
    """Lays out a snapshot as huggingface_hub does: blobs, links to them, and a branch's commit."""
    folder = cache / "models--org--tiny"
    snapshot = folder / "snapshots" / commit
    for made in (folder / "blobs", snapshot, folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    for name, body in bundled_files().items():
        blob = folder / "blobs" / hashlib.sha256(body).hexdigest()
        blob.write_bytes(body)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs" / revision).write_text(commit)
    return snapshot


def test_a_model_in_the_cache_needs_nobody(cache):
    snapshot = lay_out(cache)
    assert resolve("org/tiny") == snapshot
    loaded = jmoe.load("org/tiny", "float32")
    assert loaded.name == "org/tiny"
    assert repr(loaded.config) == repr(jmoe.load("bundled", "float32").config)


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache):
    main, tagged = lay_out(cache), lay_out(cache, OLDER, "v1")
    assert resolve("org/tiny") == main
    assert resolve("org/tiny", "v1") == resolve("org/tiny", OLDER) == tagged


def test_a_directory_wins_over_the_hub(cache, tmp_path):
    lay_out(cache)
    shutil.copytree(BUNDLED, tmp_path / "org" / "tiny")
    assert resolve("org/tiny") == Path("org/tiny")
    assert jmoe.load("org/tiny", "float32").name == name_of("org/tiny") == "tiny"


@pytest.mark.parametrize("path", ["nowhere", "./org/tiny", "/org/tiny", "a/b/c", "~/tiny", "org/"])
def test_what_is_no_name_of_the_hub_is_a_path(path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist; name a"):
        jmoe.load(path)


def refused(name, **options):
    with pytest.raises(hub.HubError) as error:
        jmoe.load(name, **options)
    return str(error.value)


def test_what_is_neither_says_what_was_tried(tiny, monkeypatch, cache):
    said = refused("org/tiny")
    assert said.startswith("org/tiny is no directory here, and http://127.0.0.1:9/org/tiny was")
    assert "HF_HUB_OFFLINE is set" in said
    assert str(cache) in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "it does not answer" in refused("org/tiny")
    online(tiny, monkeypatch)
    assert f"{tiny.url}/org/none is not there, or not for this machine" in refused("org/none")
    assert "is gated: accept its terms there, and set HF_TOKEN" in refused("org/gated")
    said = refused("org/tiny", revision="v9")
    assert f"{tiny.url}/org/tiny, revision v9 is not there: it has no such branch" in said
    assert "\n" not in said + refused("org/none")
    tiny.token = "secret"
    assert "a private one needs HF_TOKEN" in refused("org/tiny")


@pytest.mark.deep
def test_a_model_is_fetched_as_far_as_it_is_read(tiny, monkeypatch, cache):
    online(tiny, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "secret")
    tiny.token = "secret"
    directory = resolve("org/tiny", weights=False)
    assert {path.name for path in directory.iterdir()} == {
        name for name in bundled_files() if name.endswith(".json")
    }
    assert not any(path.suffix == ".safetensors" for path in directory.iterdir())
    loaded = jmoe.load("org/tiny", "float32")
    assert {path.name for path in loaded.path.iterdir()} == set(bundled_files())
    assert loaded.path == cache / "models--org--tiny" / "snapshots" / COMMIT
    prompts = ["What is 2 + 3?"]
    here = jmoe.generate(jmoe.load("bundled", "float32"), prompts, 4)
    assert jmoe.generate(loaded, prompts, 4).tokens == here.tokens
    # What a branch means is asked once: all that one process reads is of one commit.
    asked = len(tiny.asked)
    assert resolve("org/tiny") == loaded.path
    assert len(tiny.asked) == asked


def test_special_tokens_and_all_chat_templates_are_fetched(tiny, monkeypatch):
    online(tiny, monkeypatch)
    files = {
        "special_tokens_map.json": b'{"bos_token": "<|im_end|>"}',
        "chat_template.jinja": b"{{ bos_token }}",
        "additional_chat_templates/tool_use.jinja": b"tools{{ bos_token }}",
    }
    tiny.files[COMMIT] |= files
    settings = json.loads(tiny.files[COMMIT]["tokenizer_config.json"])
    del settings["bos_token"]
    tiny.files[COMMIT]["tokenizer_config.json"] = json.dumps(settings).encode()
    tokenizer = Tokenizer.load(resolve("org/tiny", weights=False))
    assert tokenizer is not None
    assert tokenizer.chat([]) == "<|im_end|>"
    assert tokenizer.chat([], {"tools": ["any"]}) == "tools<|im_end|>"


def test_a_cache_that_lacks_weights_is_not_taken_for_a_model(tiny, monkeypatch):
    online(tiny, monkeypatch)
    resolve("org/tiny", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "does not have all of it" in refused("org/tiny")


async def test_the_settings_fetch_and_name_it(tiny, monkeypatch):
    online(tiny, monkeypatch)
    config = EngineConfig(model="org/tiny", hub_revision="v1", dtype="float32")
    loaded = load_models(config, None, lambda *_: None)
    assert loaded.path.name == OLDER
    server = Server(ServerConfig(engine=config, http_port=-1, admin_http_port=-1))
    assert list(server.model_names) == [loaded.name] == ["org/tiny"]
    family = load_models(
        EngineConfig(models=("one=org/tiny", f"two={BUNDLED}"), dtype="float32"),
        None,
        lambda *_: None,
    )
    assert [model.path.name for model in family] == [COMMIT, "bundled"]
    assert family.names == ("one", "two")


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    return path


@pytest.mark.deep
def test_a_template_takes_the_models_place(template):
    talk = [{"role": "user", "content": "Hello"}]
    own = jmoe.load("bundled", "float32").tokenizer.chat(talk)
    given = jmoe.load("bundled", "float32", chat_template=template).tokenizer.chat(talk)
    assert given == "<user>Hello" != own
    config = EngineConfig(chat_template=str(template), dtype="float32")
    family = EngineConfig(
        models=(f"a={BUNDLED}", f"b={BUNDLED}"), chat_template=str(template), dtype="float32"
    )
    served = [load_models(config, None, lambda *_: None)]
    served += load_models(family, None, lambda *_: None)
    assert [model.tokenizer.chat(talk) for model in served] == [given] * 3


def test_a_template_that_cannot_be_used_is_refused_at_the_start(template, tmp_path):
    template.write_text("one\n{% for m in messages %}")
    settings = EngineConfig(chat_template=str(template))
    with pytest.raises(SettingsError, match=rf"{template.name} is no chat template: line 2"):
        prepare(settings, None, lambda *_: None)
    with pytest.raises(ValueError, match=r"none\.jinja is not readable"):
        jmoe.load("bundled", chat_template=tmp_path / "none.jinja")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json to go with it"):
        Tokenizer.load(tmp_path, template)


@pytest.mark.exhaustive
def test_the_command_line_takes_a_name(tiny, tmp_path):
    """In a process of its own, whose environment says where the Hub is, and where the cache."""
    environment = os.environ | {
        "HF_ENDPOINT": tiny.url,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }

    def run(*words, **extra):
        return subprocess.run(
            [sys.executable, "-m", "serving.cli", *words],
            env=environment | extra,
            capture_output=True,
            text=True,
            timeout=120,
        )

    shown = run("info", "org/tiny", "--hub-revision", "v1")
    assert shown.returncode == 0, shown.stderr
    assert "architecture" in shown.stdout
    assert not any("safetensors" in path for path in tiny.asked)
    refused = run("serve", "--model", "org/none", "--port", "0")
    assert refused.returncode == 2, refused.stderr
    said = f"jmoe: org/none is no directory here, and {tiny.url}/org/none is"
    assert len([line for line in refused.stderr.splitlines() if line.startswith(said)]) == 1
    offline = run("info", "org/tiny", "--hub-revision", "v1", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, shown.stdout), offline.stderr


def test_the_hub_is_imported_when_it_is_needed():
    code = "import sys, jmoe; jmoe.api.resolve('bundled'); print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
    assert huggingface_hub.__version__ >= "2"
