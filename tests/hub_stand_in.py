"""A small stand-in for the Hub's HTTP API: repositories are made, committed to, and read, on a local port."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class HubStandIn:
    """Serves while it is used as a context manager.

    Args:
        folder: where the files of the repositories are kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubStandIn":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repositories(self) -> list[str]:
        """Names of the repositories that were made."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*"))

    def files(self, repository: str) -> dict[str, bytes]:
        """The files of a repository."""
        root = self.folder / repository
        return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}

    def commit(self, repository: str) -> str:
        """The name of the repository's only revision: what a commit hash looks like, from its content."""
        return hashlib.sha1(repr(sorted(self.files(repository).items())).encode()).hexdigest()

    def run_here(self, code: str, arguments: Sequence[Any], home: Path, environment: dict[str, str]) -> str:
        """Run Python code in a new process, since huggingface_hub reads its settings once; return what it prints."""
        variables = os.environ | environment | {"HF_HOME": str(home)}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"POST {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != "Bearer hf_test":
                self.answer({"error": "no token"}, 401)
            elif path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif path == "/api/repos/create":
                request = json.loads(body)
                name = f"{request['organization']}/{request['name']}"
                (hub.folder / name).mkdir(parents=True)
                self.answer({"url": f"{hub.address}/{name}", "name": name, "id": name})
            elif "/preupload/" in path:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for file in json.loads(body)["files"]
                ]
                self.answer({"files": files})
            elif "/commit/" in path:
                repository = path.split("/commit/")[0].removeprefix("/api/models/")
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        target = hub.folder / repository / line["value"]["path"]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(base64.b64decode(line["value"]["content"]))
                commit = hub.commit(repository)
                self.answer({"commitUrl": f"{hub.address}/{repository}/commit/{commit}", "commitOid": commit})
            else:
                self.answer({"error": f"no such address: {path}"}, 404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            name, _, rest = path.removeprefix("/api/models").strip("/").partition("/resolve/")
            if path.startswith("/api/models/"):
                repository = "/".join(name.split("/")[:2])
                if repository not in hub.repositories():
                    self.answer({"error": "no such repository"}, 404, {"X-Error-Code": "RepoNotFound"})
                    return
                siblings = [{"rfilename": file} for file in hub.files(repository)]
                if "/tree/" in path:
                    folder = path.partition("/tree/")[2].partition("/")[2]
                    entries = [
                        {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for file, data in hub.files(repository).items()
                        if not folder or file.startswith(f"{folder}/")
                    ]
                    if folder and not entries:
                        self.answer({"error": "no such folder"}, 404, {"X-Error-Code": "EntryNotFound"})
                    else:
                        self.answer(entries)
                    return
                self.answer({"id": repository, "sha": hub.commit(repository), "siblings": siblings, "tags": []})
                return
            data = hub.files(name).get(rest.partition("/")[2]) if rest else None
            if data is None:
                self.answer({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": hub.commit(name)}
            self.answer(data, 200, headers)

        def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler
