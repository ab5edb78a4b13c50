"""A mirror of the Hub on this machine: as much of its API as huggingface_hub 2.4 asks for to fetch and push models."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_token_of_the_tests"
LARGE = ".safetensors"


class Mirror:
    """Repositories by name, each with its commits; what was asked for; and what goes wrong."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.created: dict[str, Any] = {}
        self.messages: list[str] = []
        self.gated: set[str] = set()
        self.needs_token: set[str] = set()
        self.cut: set[str] = set()
        """Files of which the connection ends after the first half, once."""
        self.broken = False
        """Whether every answer is an error of the server."""
        self.url = ""

    def put(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """The commit that these files are."""
        digest = hashlib.sha1(repo.encode())
        for name, data in sorted(files.items()):
            digest.update(name.encode() + data)
        commit = digest.hexdigest()
        self.commits.setdefault(repo, {})[commit] = dict(files)
        self.refs.setdefault(repo, {})[branch] = commit
        return commit

    def put_folder(self, repo: str, folder: Path, **more: bytes) -> str:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.put(repo, {**files, **more})

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        return self.commits[repo][self.refs[repo][branch]]

    def fetched(self) -> list[str]:
        """Names of the files that were sent."""
        return [line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mirror: Mirror

    def log_message(self, *arguments: Any) -> None:
        return None

    def answer(self, status: int, body: Any = b"", headers: Mapping[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def begin(self) -> list[str]:
        self.path = unquote(urlsplit(self.path).path)
        self.mirror.asked.append(f"{self.command} {self.path}")
        return self.path.strip("/").split("/")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def has_token(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def refused(self, repo: str) -> bool:
        """Whether whoever asks may not see a repository, in which case that is the answer."""
        mirror = self.mirror
        if mirror.broken:
            self.answer(500, {"error": "down"})
        elif self.headers.get("authorization") not in (None, f"Bearer {TOKEN}"):
            self.answer(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
        elif repo not in mirror.commits or (repo in mirror.needs_token and not self.has_token):
            self.refuse(404 if self.has_token else 401, "RepoNotFound")
        elif repo in mirror.gated and not self.has_token:
            self.refuse(401, "GatedRepo")
        else:
            return False
        return True

    def commit_of(self, repo: str, revision: str) -> str | None:
        commit = self.mirror.refs[repo].get(revision, revision)
        if commit not in self.mirror.commits[repo]:
            self.refuse(404, "RevisionNotFound")
            return None
        return commit

    # ------------------------------------------------------------ fetching

    def do_GET(self) -> None:
        parts = self.begin()
        if parts[:2] == ["api", "models"]:
            parts += ["revision", "main"] if len(parts) == 4 else []
            repo, kind, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
            if self.refused(repo) or (commit := self.commit_of(repo, revision)) is None:
                return
            files = self.mirror.commits[repo][commit]
            if kind == "revision":
                self.answer(200, {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]})
            elif kind == "tree":
                self.answer(200, [entry(name, data) for name, data in files.items()])
        elif parts[2:3] == ["resolve"]:
            self.send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def send_file(self, repo: str, revision: str, name: str) -> None:
        if self.refused(repo) or (commit := self.commit_of(repo, revision)) is None:
            return
        data = self.mirror.commits[repo][commit].get(name)
        if data is None:
            self.refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.command == "GET" and name in self.mirror.cut:
            self.mirror.cut.discard(name)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.answer(206 if begin else 200, data[begin:], headers)

    # ------------------------------------------------------------ pushing

    def do_POST(self) -> None:
        parts, body = self.begin(), self.body()
        if not self.has_token:
            self.answer(401, {"error": "Invalid username or password."})
        elif parts == ["api", "repos", "create"]:
            self.create(json.loads(body))
        elif parts[:2] == ["api", "models"] and parts[4] == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {
                    **{key: wanted[key] for key in ("oid", "size")},
                    "actions": {"upload": {"href": f"{self.mirror.url}/lfs/{wanted['oid']}"}},
                }
                for wanted in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif parts[:2] == ["api", "models"] and parts[4] == "commit":
            self.commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])
        elif parts == ["api", "validate-yaml"]:
            self.answer(200, {"errors": [], "warnings": []})
        else:
            self.refuse(404, "EntryNotFound")

    def create(self, wanted: Mapping[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] == "others":
            self.answer(403, {"error": "You don't have the rights to create a model under the namespace others"})
        elif repo in self.mirror.commits:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.mirror.url}/{repo}"})
        else:
            self.mirror.created[repo] = wanted
            self.mirror.put(repo, {".gitattributes": b""})
            self.answer(200, {"url": f"{self.mirror.url}/{repo}", "name": repo, "id": repo})

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.mirror.files(repo))
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.mirror.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.mirror.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        made = self.mirror.put(repo, files)
        self.answer(200, {"success": True, "commitOid": made, "commitUrl": f"{self.mirror.url}/{repo}/commit/{made}"})

    def do_PUT(self) -> None:
        parts, data = self.begin(), self.body()
        assert hashlib.sha256(data).hexdigest() == parts[1]
        self.mirror.blobs[parts[1]] = data
        self.answer(200)


def entry(name: str, data: bytes) -> dict[str, Any]:
    """A line of a listing."""
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if name.endswith(LARGE):
        found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return found


@contextmanager
def running_mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("MirrorHandler", (Handler,), {"mirror": mirror}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def variables(mirror: Mirror | None, folder: Path) -> dict[str, str]:
    """The environment variables with which huggingface_hub asks a mirror, or nobody, and keeps a cache in a folder."""
    url = mirror.url if mirror is not None else "http://127.0.0.1:9"
    found = {"HF_HOME": str(folder), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return {**found, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}


def point_to(patch: pytest.MonkeyPatch, mirror: Mirror | None, folder: Path, *, offline: bool = False) -> None:
    """Have huggingface_hub, which reads its environment variables when it is imported, ask a mirror in this process."""
    from huggingface_hub import constants

    url = mirror.url if mirror is not None else "http://127.0.0.1:9"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}))
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    patch.delenv("HF_TOKEN", raising=False)
    patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    patch.setenv("NO_PROXY", "127.0.0.1")
