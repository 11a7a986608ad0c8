"""A hub on loopback: models in memory, served as the hub serves them (model info, tree, resolve with a redirect for
large files).

Large files come from a store of another name (`localhost`), as on the hub, which must never see the token. Misbehaviour
is said by fields.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAIN = "main"
Request = tuple[str, str, dict[str, str]]


@dataclass
class Repo:
    """One model: its files by commit, and the names of commits. token: what may read it. gated: its terms must be
    accepted."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str = ""
    gated: bool = False


@dataclass
class HubServer:
    """Serves until `close`. requests: method, path and headers, in order."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    #: After how many bytes an answer with a large file breaks off, and how many answers do.
    breaks_after: int = 0
    breaks: int = 0
    #: Whether such an answer stands still instead, until the server is closed.
    stalls: bool = False
    #: A store that does not know ranges; one whose bytes are wrong.
    no_ranges: bool = False
    flips: bool = False
    #: Sizes that are told instead of the true ones.
    told_sizes: dict[str, int] = field(default_factory=dict)
    #: The status of every answer.
    fails: int = 0

    def __post_init__(self) -> None:
        self._closed = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, files: dict[str, bytes], revision: str = MAIN, **rights: Any) -> str:
        """A new commit, which `revision` names from now on; returns it."""
        commit = hashlib.sha1(
            repr(sorted((name, _git_sha(content)) for name, content in files.items())).encode()
        ).hexdigest()
        made = self.repos.setdefault(repo, Repo({}, {}, **rights))
        made.commits[commit] = files
        made.refs[revision] = commit
        return commit

    def asked(self, pattern: str) -> list[Request]:
        """The requests whose method and path match."""
        return [request for request in self.requests if re.search(pattern, f"{request[0]} {request[1]}")]

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def files_of(directory: Path) -> dict[str, bytes]:
    """What lies in `directory`, by name."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def in_shards(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same model with its tensors in two files and an index."""
    from safetensors.torch import load, save

    tensors = load(files["model.safetensors"])
    parts = {f"model-0000{n + 1}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
    rest = {name: content for name, content in files.items() if name != "model.safetensors"}
    index = {"metadata": {}, "weight_map": {tensor: file for file, named in parts.items() for tensor in named}}
    shards = {file: save({n: tensors[n] for n in named}, {"format": "pt"}) for file, named in parts.items()}
    return rest | shards | {"model.safetensors.index.json": json.dumps(index).encode()}


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.requests.append(
            (self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        )
        stored = re.fullmatch(r"/store/([0-9a-f]{64})", self.path)
        if self.hub.fails:
            self._send(self.hub.fails, b"{}")
        elif stored:
            self._large(stored[1])
        else:
            self._named(self.path.partition("?")[0])

    def _named(self, path: str) -> None:
        shapes = (
            r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<rev>[^/]+))?",
            r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)/?(?P<tree>)",
            r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)",
        )
        match = next((found for shape in shapes if (found := re.fullmatch(shape, path))), None)
        if match is None:
            self._send(404, b"{}")
            return
        said = match.groupdict()
        refusal = self._refusal(self.hub.repos.get(said["repo"]))
        if refusal is not None:
            self._send(refusal[0], b"{}", refusal[1])
            return
        repo = self.hub.repos[said["repo"]]
        commit = repo.refs.get(said["rev"] or MAIN, said["rev"])
        files = repo.commits.get(commit)
        if files is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "file" in said:
            self._resolve(commit, said["file"], files)
        elif "tree" in said:
            self._send(200, json.dumps([self._entry(name, files[name]) for name in sorted(files)]).encode())
        else:
            listed = [{"rfilename": name} for name in sorted(files)]
            self._send(200, json.dumps({"id": said["repo"], "sha": commit, "siblings": listed, "tags": []}).encode())

    def _refusal(self, repo: Repo | None) -> tuple[int, dict[str, str]] | None:
        """As the hub: who has no token is told 401 for whatever may not be seen, who has one 404, or 403 where terms
        are to be accepted."""
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token == "hf_wrong":
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        if repo is not None and token == repo.token:
            return None
        if repo is not None and repo.gated:
            return (403 if token else 401), {"X-Error-Code": "GatedRepo"}
        if repo is None or repo.token:
            return (404, {"X-Error-Code": "RepoNotFound"}) if token else (401, {})
        return None

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        size = self.hub.told_sizes.get(name, len(content))
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": _git_sha(content)}
        if _is_large(name):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def _resolve(self, commit: str, name: str, files: dict[str, bytes]) -> None:
        head = {"X-Repo-Commit": commit}
        if name not in files:
            self._send(404, b"", head | {"X-Error-Code": "EntryNotFound"})
        elif not _is_large(name):
            self._send(200, files[name], head | {"ETag": f'"{_git_sha(files[name])}"'})
        else:
            digest = hashlib.sha256(files[name]).hexdigest()
            size = self.hub.told_sizes.get(name, len(files[name]))
            head |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{digest}"'}
            self._send(302, b"", head | {"Location": f"http://localhost:{self.hub.port}/store/{digest}"})

    def _large(self, digest: str) -> None:
        hub = self.hub
        every = (
            content for repo in hub.repos.values() for files in repo.commits.values() for content in files.values()
        )
        content = next(content for content in every if hashlib.sha256(content).hexdigest() == digest)
        if hub.flips:
            content = bytes([content[0] ^ 1]) + content[1:]
        ranged = None if hub.no_ranges else re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        rest = content[int(ranged[1]) :] if ranged else content
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if not hub.breaks:
            self.wfile.write(rest)
            return
        hub.breaks -= 1
        self.wfile.write(rest[: hub.breaks_after])
        self.wfile.flush()
        if hub.stalls:
            hub._closed.wait()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
