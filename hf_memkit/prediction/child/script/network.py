"""Of huggingface_hub's requests (0.34 to 2.4) only reads leave a script's process.

| the script, or a library on its behalf | result |
|---|---|
| reads: GET, HEAD, and POST requests to `_READS` | the request is sent |
| creates a repository, commits, uploads, pushes: `_ANSWERS` | the call returns an object of its class |
| deletes, starts a job, an endpoint or a Space, asks a model …: all else that huggingface_hub sends | `WritesToHub` |
| sends its own request with huggingface_hub's client | the answer is `{}` |
| sends its own request otherwise | the request is sent |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from weakref import WeakSet

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi, RepoUrl, constants
from huggingface_hub.utils import _http, _xet
from transformers import Trainer
from transformers.utils import hub

from hf_memkit.common.errors import InputError
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.names import Names
from hf_memkit.prediction.child.script.notices import notice
from hf_memkit.prediction.child.user_code import users_line


class WritesToHub(InputError):
    """A call that would change something on the Hub, and whose result memkit cannot make up."""


def send_only_reads() -> None:
    """Replaces what writes to the Hub in this process: methods of HfApi, pushes, and `send` of the client."""
    constants.HF_HUB_DISABLE_TELEMETRY = True  # its variable was read when the libraries were loaded
    methods = {name: _answered(name, answer) for name, answer in _ANSWERS.items() if hasattr(HfApi, name)}
    methods |= {name: _refused(getattr(HfApi, name), f"{name}()") for name in _DELETES}
    _replace_methods(methods)
    for kind in (Trainer, *_with_subclasses(hub.PushToHubMixin)):  # subclasses have copies
        if "push_to_hub" in vars(kind):
            kind.push_to_hub = _pushed(kind.push_to_hub)
    for module in ("datasets.arrow_dataset", "datasets.dataset_dict", "datasets.iterable_dataset"):
        when_imported(module, _replace_pushes)
    for module in ("inference._client", "inference._generated._async_client", "repository"):
        when_imported(f"huggingface_hub.{module}", _refuse_other_clients)
    _replace_send()


def _repository(api: HfApi, arguments: dict[str, Any]) -> RepoUrl:
    kind = arguments.get("repo_type")
    name = arguments["repo_id"]
    if "/" not in name:  # the Hub adds the user's name
        user = "user"
        with contextlib.suppress(Exception):  # offline, or no token
            user = api.whoami(token=arguments.get("token"))["name"]
        name = f"{user}/{name}"
    prefix = f"{kind}s/" if kind not in (None, "model") else ""
    return RepoUrl(f"{api.endpoint}/{prefix}{name}", endpoint=api.endpoint)


def _commit(api: HfApi, arguments: dict[str, Any]) -> CommitInfo:
    operations = arguments.get("operations") or ()
    if any(type(each).__name__ == "CommitOperationDelete" for each in operations):
        raise _refusal("a commit that deletes files")
    repository = _repository(api, arguments)
    pull_request = f"{repository}/discussions/1" if arguments.get("create_pr") else None
    options: dict[str, Any] = {"oid": _OID, "pr_url": pull_request}
    if "_endpoint" in CommitInfo.__dataclass_fields__:
        options["_endpoint"] = api.endpoint
    for name in ("commit_message", "commit_description"):
        options[name] = arguments.get(name) or ""
    return CommitInfo(commit_url=f"{repository}/commit/{_OID}", **options)


_OID: Final = "0" * 40


def _nothing(api: HfApi, arguments: dict[str, Any]) -> None:
    """The answer of methods that return None."""


_ANSWERS: Final[dict[str, Callable[[HfApi, dict[str, Any]], Any]]] = {
    "create_repo": _repository,
    **dict.fromkeys(("create_commit", "upload_file", "upload_folder"), _commit),
    **dict.fromkeys(
        ("create_branch", "create_tag", "preupload_lfs_files", "update_repo_settings", "upload_large_folder"), _nothing
    ),
}  # fmt: skip
"""Method of HfApi after which a script goes on → what it returns, from the arguments by name."""

_DELETES: Final = [name for name in dir(HfApi) if name.startswith("delete_")]
_CLIENTS: Final = [get for name in ("get_session", "get_async_session") if (get := vars(_http).get(name))]
_ADDRESSES: Final = [get for name in ("xet_connection_info_refresh_url",) if (get := vars(_xet).get(name))]

NAMES: Final = Names(
    (*(getattr(HfApi, name) for name in (*_ANSWERS, *_DELETES) if hasattr(HfApi, name)), *_CLIENTS, *_ADDRESSES)
)


def _answered(name: str, answer: Callable[[HfApi, dict[str, Any]], Any]) -> Any:
    original = getattr(HfApi, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def answered(api: HfApi, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(api, *args, **kwargs).arguments
        _note(f"{name}()")
        result = answer(api, arguments)
        return api.run_as_future(lambda: result) if arguments.get("run_as_future") else result

    return answered


def _refused(original: Any, what: str) -> Any:
    @functools.wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise _refusal(what)

    return refused


def _replace_methods(methods: dict[str, Any]) -> None:
    """Replaces methods of HfApi and, in all modules, bound ones (`huggingface_hub.create_repo` is one); also the
    functions that give a client, and those that give hf_xet the right to write."""
    new: dict[Any, Any] = {getattr(HfApi, name): replacement for name, replacement in methods.items()}
    for name, replacement in methods.items():
        setattr(HfApi, name, replacement)
    new |= {get: _remembering(get) for get in _CLIENTS}
    new |= {address: _reading_address(address) for address in _ADDRESSES}
    for names, key in NAMES.places():
        value = names[key]
        if type(value) is types.MethodType:
            names[key] = types.MethodType(new.get(value.__func__, value.__func__), value.__self__)
        else:
            names[key] = new.get(value, value)


_clients: Final[WeakSet[Any]] = WeakSet()  # those that huggingface_hub gave to anybody


def _remembering(get: Any) -> Any:
    @functools.wraps(get)
    def remembered() -> Any:
        client = get()
        _clients.add(client)
        return client

    return remembered


def _reading_address(original: Any) -> Any:
    """The address where hf_xet, native code, asks for the right to read or to write files."""

    @functools.wraps(original)
    def address(*, token_type: Any, **kwargs: Any) -> Any:
        if token_type == _xet.XetTokenType.WRITE:
            raise _refusal("an upload")
        return original(token_type=token_type, **kwargs)

    return address


def _pushed(original: Any) -> Any:
    """A `push_to_hub` that neither saves nor sends; keeps docstring and signature, which Unsloth reads (save.py)."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def pushed(*args: Any, **kwargs: Any) -> CommitInfo:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        if "repo_id" not in arguments:  # a Trainer
            arguments["repo_id"] = getattr(args[0], "hub_model_id", None) or "model"
        arguments["repo_type"] = "dataset" if original.__module__.startswith("datasets.") else None
        _note("push_to_hub()")
        return _commit(HfApi(), arguments)

    return pushed


def _replace_pushes(module: types.ModuleType) -> None:
    for kind in vars(module).values():
        if isinstance(kind, type) and "push_to_hub" in vars(kind) and kind.__module__ == module.__name__:
            kind.push_to_hub = _pushed(kind.push_to_hub)  # type: ignore[attr-defined]


def _refuse_other_clients(module: types.ModuleType) -> None:
    """Requests to models, which before 1.0 have another client if they are async; pushes by git, before 1.0."""
    for kind in [value for value in vars(module).values() if isinstance(value, type)]:
        for name, what in (("_inner_post", "a request to a model"), ("git_push", "git_push()")):
            if name in vars(kind):
                setattr(kind, name, _refused(getattr(kind, name), what))


def _with_subclasses(kind: type) -> Iterator[Any]:
    yield kind
    each: type
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


_READS: Final = re.compile(r"/(paths-info(/.*)?|oauth/(device|token))$")
"""Paths of POST requests that read: files of a repository or bucket; a token to read with."""

_HUB: Final = f"{Path(huggingface_hub.__file__).parent}/"


def _replace_send() -> None:
    """Replaces `send` in the classes of clients, which all sessions call, those that the script has made, too."""
    library: Any = next(filter(None, map(vars(_http).get, ("httpx2", "httpx", "requests"))))
    if library.__name__ == "requests":
        library.Session.send = _sent(library.Session.send, _requests_answer)
        return

    def answer(request: Any) -> Any:
        return library.Response(200, json={}, request=request)

    library.Client.send = _sent(library.Client.send, answer)
    original = library.AsyncClient.send

    @functools.wraps(original)
    async def send(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return answer(request) if _is_kept(client, request) else await original(client, request, *args, **kwargs)

    library.AsyncClient.send = send


def _sent(original: Any, answer: Callable[[Any], Any]) -> Any:
    @functools.wraps(original)
    def send(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return answer(request) if _is_kept(client, request) else original(client, request, *args, **kwargs)

    return send


def _requests_answer(request: Any) -> Any:
    from requests import Response

    response = Response()
    response.status_code, response.url, response.request, response._content = 200, request.url, request, b"{}"
    return response


def _is_kept(client: Any, request: Any) -> bool:
    """Whether huggingface_hub, or the script with its client, would write. Raises if huggingface_hub needs the
    answer."""
    path = urlsplit(str(request.url)).path
    if request.method in ("GET", "HEAD", "OPTIONS"):
        reads = "/xet-write-token/" not in path  # with it hf_xet uploads
    else:
        reads = request.method == "POST" and _READS.search(path) is not None
    if reads:
        return False
    frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    callers = [code.co_name for code in frames if code.co_filename.startswith(_HUB)]
    callers = [name for name in callers if not name.startswith("_inner")]  # decorators
    if callers and not path.endswith("/api/validate-yaml"):
        raise _refusal(f"{callers[-1]}()")
    if client in _clients and not callers:
        _note(f"{request.method} {path}", kind=request.method)
    return bool(callers) or client in _clients


_noted: set[str] = set()


def _note(what: str, kind: str = "") -> None:
    """Notes the first call of its kind."""
    if (kind or what) not in _noted:
        _noted.add(kind or what)
        line = users_line() or "the script"
        notice(f"{line}: {what}: nothing is sent, because a prediction only reads from the Hub")


def _refusal(what: str) -> WritesToHub:
    return WritesToHub(
        f"{what} would do more than read from the Hub, and a prediction does not. Call it below train(), or leave "
        "it out while you predict"
    )
