"""Requests of a predicted script: a local server has the Hub's role and lists those that come."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.child.script.trackers import TRACKERS
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker
from tests.predict_script.test_command import TINY


class Server(ThreadingHTTPServer):
    """Knows one user and one repository, without files. `requests` has (method, path, whether a token came)."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bool]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def writes(self) -> list[tuple[str, str, bool]]:
        return [each for each in self.requests if each[0] not in ("GET", "HEAD")]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        self.server.requests.append((self.command, self.path, "Authorization" in self.headers))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        repository = {"name": "me", "id": "me/data", "sha": "0" * 40, "siblings": []}
        answer = json.dumps(repository if self.command == "GET" else []).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


ONLINE = """
from huggingface_hub import constants, hf_api
constants.ENDPOINT = hf_api.api.endpoint = {url!r}  # as HF_ENDPOINT and HF_HUB_OFFLINE=0 at the start
constants.HF_HUB_OFFLINE = False
"""

Online = Callable[[str], Outcome]


def online_request(server: Server, folder: Path, code: str) -> ScriptRequest:
    """A script that trains below the code, with a token, the server as the Hub, and an empty home."""
    (folder / "home").mkdir()
    (folder / "train.py").write_text(ONLINE.format(url=server.url) + TINY + code + "\ntrainer(tiny()).train()\n")
    environment = {**os.environ, "HF_TOKEN": "hf_canary", "HF_HUB_OFFLINE": "0", "HOME": str(folder / "home")}
    return ScriptRequest(UserScript(str(folder / "train.py")), str(folder), environment)


@pytest.fixture
def online(worker: Worker, server: Server, tmp_path: Path) -> Online:
    return lambda code: worker.run(online_request(server, tmp_path, code))


WRITES = """
import asyncio
from concurrent.futures import Future
from pathlib import Path
import huggingface_hub
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, RepoUrl, create_repo, get_session, upload_file
from huggingface_hub import CommitScheduler, HfFileSystem, ModelCard, PyTorchModelHubMixin, upload_folder
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast, ViTImageProcessor
from tokenizers import Tokenizer, models

url = create_repo("me/data", repo_type="dataset", private=True)
assert type(url) is RepoUrl and (url.repo_id, url.repo_type) == ("me/data", "dataset"), url
assert create_repo("short").repo_id == "me/short"
Path("folder").mkdir()
Path("folder/a.txt").write_text("secret")
api = HfApi()
commits = [
    upload_file(path_or_fileobj=b"secret", path_in_repo="a.txt", repo_id="me/x"),
    upload_folder(folder_path="folder", repo_id="me/x", delete_patterns="*"),
    api.create_commit("me/x", [CommitOperationAdd("a.txt", b"secret")], commit_message="Add", create_pr=True),
    api.upload_file(path_or_fileobj=b"secret", path_in_repo="a.txt", repo_id="me/x", run_as_future=True).result(),
    tiny().push_to_hub("me/x"),
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))).push_to_hub("me/x"),
    ViTImageProcessor().push_to_hub("me/x"),
    Dataset.from_list([{"a": 1}]).push_to_hub("me/data"),
    DatasetDict(train=Dataset.from_list([{"a": 1}])).push_to_hub("me/data"),
]
assert {type(each) for each in commits} == {CommitInfo}
assert (commits[2].commit_message, commits[2].pr_num, commits[2].repo_url.repo_id) == ("Add", 1, "me/x")
assert commits[-1].repo_url.repo_type == "dataset"
if hasattr(api, "upload_large_folder"):  # until 1.x
    api.upload_large_folder("me/x", "folder", repo_type="model")
api.create_branch("me/x", branch="b")
api.create_tag("me/x", tag="t")
ModelCard("---\\nlicense: mit\\n---\\n").push_to_hub("me/x")
CommitScheduler(repo_id="me/x", folder_path="folder").trigger().result()
with HfFileSystem().open("datasets/me/data/a.txt", "w") as file:
    file.write("secret")

class Own(torch.nn.Module, PyTorchModelHubMixin):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

Own().push_to_hub("me/x")
assert trainer(tiny(), push_to_hub=True, hub_model_id="me/x").hub_model_id == "me/x"
assert get_session().post(f"{constants.ENDPOINT}/api/anything", json={}).json() == {}

if hasattr(huggingface_hub, "get_async_session"):  # from 1.0 on
    library = sys.modules[type(get_session()).__module__.partition(".")[0]]
    own = library.Client()
    huggingface_hub.set_client_factory(lambda: own)
    assert get_session().post(f"{constants.ENDPOINT}/api/own").json() == {}

    async def later():
        async with huggingface_hub.get_async_session() as client:
            return (await client.put(f"{constants.ENDPOINT}/api/later")).json()

    assert asyncio.run(later()) == {}
else:
    import requests
    huggingface_hub.configure_http_backend(requests.Session)
    assert get_session().post(f"{constants.ENDPOINT}/api/own").json() == {}
"""


def test_a_script_that_writes_to_the_hub_goes_on_and_nothing_is_sent(online: Online, server: Server) -> None:
    check_writes(online(WRITES), server)


def check_writes(outcome: Outcome, server: Server) -> None:
    assert outcome.training is not None, outcome.failed
    assert server.requests and server.writes() == []
    assert not [path for _, path, _ in server.requests if "write-token" in path]
    notes = [note for note in outcome.training.notices if "nothing is sent" in note]
    calls = [note.split(": ")[1] for note in notes]
    assert len(calls) == len(set(calls)) and {"create_repo()", "push_to_hub()", "POST /api/anything"} <= set(calls)
    assert "POST /api/own" not in calls  # the same kind
    lines = (ONLINE + TINY + WRITES).splitlines()
    first = lines.index('url = create_repo("me/data", repo_type="dataset", private=True)') + 1
    assert any(note.startswith(f"train.py, line {first}: create_repo()") for note in notes)


def test_reads_are_sent(online: Online, server: Server) -> None:
    outcome = online("""
from huggingface_hub import HfApi, get_session
assert HfApi().get_paths_info("me/x", ["a.txt"]) == []
get_session().get(f"{constants.ENDPOINT}/api/models/me/x")
""")
    assert outcome.training is not None, outcome.failed
    assert ("POST", "/api/models/me/x/paths-info/main", True) in server.requests
    assert "/api/models/me/x" in [path for _, path, _ in server.requests]


STOPS = {
    "delete_repo": 'huggingface_hub.delete_repo("me/x")',
    "delete_file": 'huggingface_hub.HfApi().delete_file("a.txt", "me/x")',
    "a commit that deletes": 'huggingface_hub.HfFileSystem()._api.create_commit("me/x", '
    '[huggingface_hub.CommitOperationDelete("a.txt")], commit_message="Delete")',
    "run_job": 'huggingface_hub.run_job(image="python", command=["true"], namespace="me")',
    "pause_inference_endpoint": 'huggingface_hub.pause_inference_endpoint("me", namespace="me")',
    "restart_space": 'huggingface_hub.restart_space("me/x")',
    "a request to a model": 'huggingface_hub.InferenceClient(constants.ENDPOINT).text_generation("secret")',
    "an upload": "from huggingface_hub.utils._xet import *; xet_connection_info_refresh_url("
    'token_type=XetTokenType.WRITE, repo_id="me/x", repo_type="model")',
}


@pytest.mark.parametrize(
    "call",
    [name if name in ("delete_repo", "run_job") else pytest.param(name, marks=pytest.mark.slow) for name in STOPS],
)
def test_what_cannot_be_made_up_stops(online: Online, server: Server, call: str) -> None:
    outcome = online(f"import huggingface_hub\n{STOPS[call]}\n")
    assert outcome.failed is not None and outcome.failed.type == "WritesToHub", outcome
    assert outcome.failed.message.startswith(call) and outcome.failed.place.startswith("train.py, line ")
    assert server.writes() == []


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_trackers_start_nothing_whatever_their_arguments_are(online: Online, server: Server, tmp_path: Path) -> None:
    before = files(tmp_path) | {"home", "train.py"}
    outcome = online("""
import os
import wandb
assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1" and constants.HF_HUB_DISABLE_TELEMETRY
for mode in ("offline", "online"):
    wandb.login(key="0" * 40)
    run = wandb.init(project="p", mode=mode, dir=".", config={"lr": 1}, settings=wandb.Settings(mode=mode))
    assert run.config["lr"] == wandb.config.lr == 1 and isinstance(run, wandb.Run)
    wandb.log({"loss": 1})
    artifact = wandb.Artifact("x", "y")
    artifact.add_file(__file__)
    run.log_artifact(artifact)
    wandb.finish()
import trackio
run = trackio.init(project="p", config={"lr": 1}, space_id="me/x")
assert run.config["lr"] == 1
trackio.log({"loss": 1})
trackio.save(__file__)
trackio.finish()
""")
    assert outcome.training is not None, outcome.failed
    assert files(tmp_path) == before and server.writes() == []
    notes = [note for note in outcome.training.notices if "dashboard" in note]
    assert len(notes) == 2 and all(note.startswith("train.py, line ") for note in notes)


@pytest.mark.parametrize(
    "read",
    [
        'import wandb\nwandb.init(mode="offline").use_artifact("me/x:latest")',
        pytest.param('import wandb\nwandb.init()\nwandb.use_artifact("x")', marks=pytest.mark.slow),
        pytest.param("import wandb\nwandb.Api()", marks=pytest.mark.slow),
        pytest.param('import wandb\nwandb.sweep({}, project="p")', marks=pytest.mark.slow),
        pytest.param("import trackio\ntrackio.init('p').use_artifact('x')", marks=pytest.mark.slow),
    ],
)
def test_a_read_from_a_tracker_stops(online: Online, read: str) -> None:
    outcome = online(read)
    assert outcome.failed is not None and outcome.failed.type == "ReadsTracker", outcome
    assert outcome.failed.place.startswith("train.py, line ")


def test_trackers_that_are_not_installed_here(online: Online, tmp_path: Path) -> None:
    """Packages of the same names and functions, planted in the script's folder: each call would write a file."""
    names = {library: row for library, row in TRACKERS.items() if library not in ("wandb", "trackio")}
    for library, row in names.items():
        file = tmp_path.joinpath(*library.split(".")).with_suffix(".py")
        if "." in library:
            file.parent.mkdir(parents=True)
        file.write_text(_planted(" ".join((row.starts, row.reads, row.mode))))
    before = files(tmp_path) | {"home", "train.py"}
    outcome = online(f"""
import importlib, os, sys
sys.dont_write_bytecode = True
from operator import attrgetter
for library, (starts, mode, reads) in {
        {library: (_names(row.starts), row.mode, _names(row.reads)) for library, row in names.items()}
    }.items():
    module = importlib.import_module(library)
    for name in starts:
        run = attrgetter(name)(module)("x", config={{"lr": 1}})
        with run as entered:
            entered["a"].append(1)
            entered.log_metric("loss", 1)
        assert f"{{run.id}}" and run.connect([1]) == [1]
    if mode:
        assert getattr(module, mode)(mode="online") == "disabled"
    for name in reads:
        try:
            attrgetter(name)(module)("x")
        except Exception as error:
            assert type(error).__name__ == "ReadsTracker", (library, name, error)
        else:
            raise AssertionError((library, name))
import codecarbon, mlflow, neptune
@codecarbon.track_emissions(project_name="p")
@mlflow.trace
def double(x):
    return 2 * x
assert double(2) == 4
neptune.Run()["loss"].fetch()
""")
    assert outcome.failed is not None and outcome.failed.type == "ReadsTracker", outcome
    assert "fetch" in outcome.failed.message and files(tmp_path) == before


def _names(patterns: str) -> list[str]:
    return [each.replace("*", "x") for each in patterns.split()]


def _planted(patterns: str) -> str:
    """A module with these functions, and classes with these methods."""
    function = "def {}(*args, mode='', **kwargs):\n    {}\n    return mode\n"
    code = ""
    for name in dict.fromkeys(_names(patterns)):
        kind, _, method = name.rpartition(".")
        writes = f"if mode != 'disabled': open({json.dumps(name)}, 'w')"
        if kind:
            code += "" if f"class {kind}:" in code else f"class {kind}:\n    pass\n"
            code += function.format(method, writes) + f"{kind}.{method} = classmethod({method})\ndel {method}\n"
        else:
            code += function.format(name, writes)
    return code
