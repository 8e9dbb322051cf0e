"""A stand-in for the Hugging Face hub on loopback, with the replies that `huggingface_hub` expects.

It records the files of each commit and every byte that a client sent. It never contacts the real hub.
"""

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "hf_" + "stand" + "In" * 16
MAX_BODY = 256 << 20
COMMIT = "0" * 40  # of the branch main, for readers
LARGE = (".safetensors", ".parquet", "tokenizer.json")


@dataclass
class Repository:
    """A repository: its visibility, its branches with their files, the summaries of its commits."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)


@dataclass
class StandIn:
    """State of the hub. `fail` maps a part of a path to the HTTP status of all requests with it."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    fail: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[repo].branches[branch]

    @property
    def sent(self) -> bytes:
        """All bytes of all request bodies and uploaded objects, with files in base64 decoded too."""
        bodies = [body for _, _, _, body in self.requests]
        decoded = [base64.b64decode(text) for body in bodies for text in _encoded(body)]
        return b"\n".join([*bodies, *decoded, *self.objects.values()])


def _encoded(body: bytes) -> Iterator[str]:
    """Yield the contents and samples of files in a body of JSON or JSON lines, as base64."""
    for line in body.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            return
        if isinstance(document, dict):
            yield from (entry["sample"] for entry in document.get("files", ()))
            if document.get("key") == "file":
                yield document["value"]["content"]


def _application(hub: StandIn) -> web.Application:
    routes = web.RouteTableDef()

    @web.middleware
    async def checked(request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.read()
        hub.requests.append((request.method, request.path, dict(request.headers), body))
        for part, status in hub.fail.items():
            if part in request.path:
                return web.json_response({"error": f"the stand-in fails with {status}"}, status=status)
        is_object = request.path.startswith("/objects/")  # a storage service without a login
        if not is_object and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials in Authorization header"}, status=401)
        if "kind" in request.match_info and _name(request) not in hub.repositories:
            return web.json_response(
                {"error": "Repository not found"}, status=404, headers={"X-Error-Code": "RepoNotFound"}
            )
        return await handler(request)

    def no_entry() -> web.Response:
        return web.json_response({"error": "Entry not found"}, status=404, headers={"X-Error-Code": "EntryNotFound"})

    @routes.post("/api/repos/create")
    async def create(request: web.Request) -> web.Response:
        wanted = await request.json()
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in hub.repositories:
            return web.json_response({"error": "You already created this repo", "url": f"{hub.url}/{name}"}, status=409)
        hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        return web.json_response({"url": f"{hub.url}/{name}"})

    @routes.get("/api/{kind:models|datasets}/{owner}/{name}")
    @routes.get("/api/{kind:models|datasets}/{owner}/{name}/revision/{branch}")
    async def about(request: web.Request) -> web.Response:
        repository = hub.repositories[_name(request)]
        identity = {"id": "/".join(_name(request).split("/")[-2:]), "_id": "1", "private": repository.private}
        return web.json_response(identity | {"sha": COMMIT, "tags": [], "downloads": 0, "likes": 0, "siblings": []})

    @routes.get("/api/{kind:models|datasets}/{owner}/{name}/tree/{branch}")
    @routes.get("/api/{kind:models|datasets}/{owner}/{name}/tree/{branch}/{folder:.+}")
    async def tree(request: web.Request) -> web.Response:
        files = _served(hub.repositories[_name(request)], request)
        folder = request.match_info.get("folder")
        rows = [_row(path, data) for path, data in files.items() if not folder or path.startswith(f"{folder}/")]
        return web.json_response(rows) if rows or not folder else no_entry()

    @routes.post("/api/{kind:models|datasets}/{owner}/{name}/paths-info/{branch}")
    async def sizes(request: web.Request) -> web.Response:
        repository = hub.repositories[_name(request)]
        form = await request.post() if request.content_type != "application/json" else await request.json()
        paths = form.getall("paths", []) if hasattr(form, "getall") else form["paths"]
        files = _served(repository, request)
        return web.json_response([_row(path, files[path]) for path in paths if path in files])

    @routes.get("/{owner}/{name}/resolve/{branch}/{path:.+}")
    @routes.get("/{kind:datasets}/{owner}/{name}/resolve/{branch}/{path:.+}")
    async def resolve(request: web.Request) -> web.Response:
        repository = hub.repositories[_name(request)]
        data = _served(repository, request).get(request.match_info["path"])
        if data is None:
            return no_entry()
        return web.Response(body=data, headers={"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT})

    @routes.post("/api/{kind:models|datasets}/{owner}/{name}/branch/{branch}")
    async def branch(request: web.Request) -> web.Response:
        repository = hub.repositories[_name(request)]
        if request.match_info["branch"] in repository.branches:
            return web.json_response({"error": "Reference already exists"}, status=409)
        repository.branches[request.match_info["branch"]] = dict(repository.branches["main"])
        return web.json_response({})

    @routes.post("/api/validate-yaml")
    async def validate(request: web.Request) -> web.Response:
        import yaml

        document = await request.json()
        metadata = yaml.safe_load(document["content"].split("---")[1])
        if metadata.get("license") == "no-such-license":
            errors = [{"message": '"license" must be one of [apache-2.0, mit, ...]'}]
            return web.json_response({"error": "invalid", "errors": errors, "warnings": []}, status=400)
        return web.json_response({"errors": [], "warnings": []})

    @routes.post("/api/{kind:models|datasets}/{owner}/{name}/preupload/{branch}")
    async def preupload(request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        return web.json_response({"files": modes})

    @routes.post("/{path:.+}.git/info/lfs/objects/batch")
    async def batch(request: web.Request) -> web.Response:
        objects = (await request.json())["objects"]
        replies = [{**entry, "actions": {"upload": {"href": f"{hub.url}/objects/{entry['oid']}"}}} for entry in objects]
        return web.json_response({"transfer": "basic", "objects": replies})

    @routes.put("/objects/{oid}")
    async def put(request: web.Request) -> web.Response:
        data = await request.read()
        assert hashlib.sha256(data).hexdigest() == request.match_info["oid"]
        hub.objects[request.match_info["oid"]] = data
        return web.Response()

    @routes.post("/api/{kind:models|datasets}/{owner}/{name}/commit/{branch}")
    async def commit(request: web.Request) -> web.Response:
        repository = hub.repositories[_name(request)]
        files = repository.branches[request.match_info["branch"]]
        for line in (await request.read()).splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                repository.commits.append(value["summary"])
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            else:
                assert operation["key"] == "deletedFile"
                del files[value["path"]]
        return web.json_response({"commitUrl": f"{hub.url}/{_name(request)}/commit/{'1' * 40}", "commitOid": "1" * 40})

    application = web.Application(middlewares=[checked], client_max_size=MAX_BODY)
    application.add_routes(routes)
    return application


def _name(request: web.Request) -> str:
    parts = request.match_info
    return ("datasets/" if parts.get("kind") == "datasets" else "") + f"{parts['owner']}/{parts['name']}"


def _served(repository: Repository, request: web.Request) -> dict[str, bytes]:
    """Return the files of the branch, or of the commit, that the path names."""
    branch = request.match_info["branch"]
    return repository.branches["main" if branch == COMMIT else branch]


def _row(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # git's hash of a file


@contextmanager
def running_stand_in() -> Iterator[StandIn]:
    """Serve a stand-in in a separate thread until the block ends."""
    hub, loop = StandIn(), asyncio.new_event_loop()
    runner = web.AppRunner(_application(hub))

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()
