"""Tokens, keys and passwords, which memkit neither writes nor shows. A process receives them unchanged.

A secret is recognised by the name before it (`--hub_token S`, `WANDB_API_KEY=S`, `"api_key": "S"`), by its form
(`hf_…`), or as the password of an address. A variable replaces it: `--hub_token "$HF_TOKEN"` in a command works where
that variable is set.

Standard library only: a process that trains writes its records through this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_PASSWORDS: Final = frozenset({"secret", "password", "passwd", "passphrase", "apikey", "credential", "signature"})
_KEYS: Final = frozenset(
    {"access", "account", "anthropic", "api", "auth", "aws", "azure", "clearml", "client", "comet", "dagshub",
     "encryption", "gcp", "google", "hf", "hub", "license", "mlflow", "neptune", "openai", "private", "secret",
     "service", "storage", "swanlab", "trackio", "wandb"}
)  # fmt: skip
"""Words before `key` of a secret: `wandb_key`. `sort_key` has none."""

_NOT_TOKENS: Final = frozenset(
    {"audio", "begin", "boi", "bos", "class", "cls", "decoder", "end", "eoi", "eos", "first", "image", "instruction",
     "last", "mask", "max", "min", "new", "next", "num", "pad", "padding", "per", "prefix", "register", "response",
     "sep", "special", "speech", "start", "stop", "suffix", "text", "think", "unk", "unknown", "video", "vision"}
)  # fmt: skip
"""Words before `token` of a token of text: `eos_token`."""

_VARIABLES: Final = {"TOKEN": "HF_TOKEN", "HUB_TOKEN": "HF_TOKEN", "HF_HUB_TOKEN": "HF_TOKEN",
                     "PUSH_TO_HUB_TOKEN": "HF_TOKEN", "USE_AUTH_TOKEN": "HF_TOKEN", "AUTH_TOKEN": "HF_TOKEN",
                     "HUGGINGFACE_TOKEN": "HF_TOKEN", "HF_KEY": "HF_TOKEN", "HUB_KEY": "HF_TOKEN",
                     "WANDB_KEY": "WANDB_API_KEY", "WANDB_TOKEN": "WANDB_API_KEY"}  # fmt: skip
"""Name in capitals → the variable that libraries read. Others have the variable of their name."""

_FORMS: Final = (
    ("HF_TOKEN", r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}"),
    ("WANDB_API_KEY", r"wandb_v\d_\w{20,}"),
    ("GITHUB_TOKEN", r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"),
    ("GITLAB_TOKEN", r"glpat-[\w-]{16,}"),
    ("AWS_ACCESS_KEY_ID", r"AKIA[A-Z0-9]{16}"),
    ("API_KEY", r"sk-[A-Za-z0-9_-]{20,}"),
)
_FORM: Final = re.compile(
    "|".join(rf"(?P<{variable}>(?<![A-Za-z0-9_])(?:{form}))" for variable, form in _FORMS), re.ASCII
)

_ADDRESS: Final = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{1,30}://(?P<user>[^\s/@:'\"]{0,200}):)(?P<value>[^\s/@'\"]{1,500})(?=@)"
)
_BEARER: Final = re.compile(r"(?i)(?P<before>\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{16,})")
# Bounded, so that a long text is read once.
_NAMED: Final = re.compile(
    r"""(?P<before>
        (?<![\w-]) (?P<dashes>-{0,2}) (?P<q>["']?) (?P<name>[A-Za-z_][\w.-]{0,100}) (?P=q)
        (?P<between> [ ]?=[ ]? | [ ]?:[ ]{0,8} | [ ]{1,8} )
    )
    (?P<value> "[^"\n]{0,2000}" | '[^'\n]{0,2000}' | [^\s"'&]{0,2000}[^\s"'&;,)\]}] )""",
    re.VERBOSE,
)
_SIGNS: Final = re.compile(
    r"(?i)token|key|secret|pass|credential|signature|://|hf_|bearer|basic|gh[pousr]_|sk-|glpat|AKIA"
)
"""Without one of which a text has no secret."""

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_HARMLESS: Final = re.compile(
    r"""(?ix) (?: true | false | none | null | yes | no | …+ | \*+ | <.*> | \[.*\] | [,.;:)\]}|]*
        | (?-i:\$\{?[A-Z_][A-Z0-9_]*\}?) )
    (?: [,;)\]}]* )"""
)
"""Values that are no secrets: switches, variables and masks, such as Trainer's `<HUB_TOKEN>`."""

_NUMBER: Final = re.compile(r"\d{1,6}[,;)\]}]*")
_LEAST: Final = 8
"""Characters of a secret behind a colon without quotes."""

_RANDOM: Final = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}")

MASK: Final = re.compile("\0([A-Z0-9_]+)\0")
"""A hidden secret in the words of `hidden_words`; its group is the variable."""


def is_secret(name: str, value: str) -> bool:
    """Whether an argument, key or variable of this name and value is a secret.

    >>> is_secret("hub_token", "abc"), is_secret("tokenizer_name", "gpt2"), is_secret("eos_token", "</s>")
    (True, False, False)
    """
    if _HARMLESS.fullmatch(value.strip("\"' ")):
        return False
    words = [word.lower() for word in _WORDS.findall(name)] or [""]
    *before, last = words
    if last.removesuffix("s") not in _PASSWORDS and _NUMBER.fullmatch(value):
        return False
    if last.removesuffix("s") in _PASSWORDS:
        return last.removesuffix("s") != "credential" or not value.startswith(("/", "./", "../", "~"))
    if last == "token":
        return not before or before[-1] not in _NOT_TOKENS
    if last == "tokens":
        return bool({"access", "auth", "api", "hf", "hub"} & {*before})
    if last in ("key", "keys", "id") and before:
        if last == "id":  # AWS_ACCESS_KEY_ID
            return before[-2:] == ["access", "key"]
        return before[-1] in _KEYS or _RANDOM.fullmatch(value) is not None or name.isupper()
    return False


def masked(text: str) -> str:
    """`text` without its secrets.

    >>> masked("python train.py --hub_token abc --api-key=d --max_tokens 5")
    'python train.py --hub_token $HF_TOKEN --api-key=$API_KEY --max_tokens 5'
    """
    return MASK.sub(r"$\1", _hidden(text))


def masked_json(content: Any) -> Any:
    """A JSON value without the secrets in its texts, under its keys, and among the words of its commands."""
    match content:
        case str():
            return masked(content)
        case Mapping():
            name = content.get("key")  # of a setting: {"key": "arguments.hub_token", "value": "S"}
            return {
                key: masked_value(name if key == "value" and isinstance(name, str) else str(key), value)
                for key, value in content.items()
            }
        case list() | tuple():
            if content and all(isinstance(item, str) for item in content):
                return [MASK.sub(r"$\1", word) for word in hidden_words(content)]
            return [masked_json(item) for item in content]
    return content


def hidden_words(words: Sequence[str]) -> Iterator[str]:
    """The words of a command; a secret, which may be a part of a word, is a `MASK`."""
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if option and not word.startswith("--") and is_secret(option, word):
            yield _mask(option, word)
        elif equals and is_secret(name, value) and not re.search(r"[\s:/?]", name):
            yield f"{name}={_mask(name, value)}"
        else:
            yield _hidden(word)
        option = word if word.startswith("-") and not equals else ""


def masked_value(name: str, value: Any) -> Any:
    """A JSON value under this key, without secrets."""
    if isinstance(value, str) and is_secret(name, value):
        return MASK.sub(r"$\1", _mask(name, value))
    return masked_json(value)


def _hidden(text: str) -> str:
    if not _SIGNS.search(text):
        return text
    text = _FORM.sub(lambda match: f"\0{match.lastgroup}\0", text.replace("\0", ""))
    text = _ADDRESS.sub(lambda match: match["before"] + _hide("PASSWORD", match["value"]), text)
    text = _BEARER.sub(lambda match: match["before"] + _hide("TOKEN", match["value"]), text)
    return "".join(_hidden_named(text))


def _hidden_named(text: str) -> Iterator[str]:
    """The text in pieces, with values behind a name hidden. A word is looked at as a value and as a name."""
    end = start = 0
    while (match := _NAMED.search(text, start)) is not None:
        name, value, between, stop = match["name"], match["value"], match["between"], match.end()
        quote = value[0] if value[0] in ("'", '"') else ""
        before = text[match.start() - 1 : match.start()]
        is_open = not quote and not match["q"] and before in ("'", '"') and not _HARMLESS.fullmatch(value)
        if is_open and (closed := text.find(before, stop)) > 0:
            value, stop = text[match.start("value") : closed], closed  # 'hub_token=a b'
        # An option takes the next word. `a token: missing` is a sentence, `hub_token: abcdefgh` a line of YAML.
        if between.isspace():
            is_value = bool(match["dashes"]) and not value.startswith("--")
        else:
            is_key = re.search("[_-]", name) is not None and (":" not in between or len(value) >= _LEAST)
            is_value = between == "=" or bool(quote) or is_key
        if is_value and is_secret(name, value):
            name = f"url_{name}" if before in ("?", "&") else name  # of another service than the Hub
            yield text[end : match.start("value")] + quote + _mask(name, value.strip("\"'")) + quote
            start = end = stop
        else:
            start = match.end("between")
    yield text[end:]


def _mask(name: str, value: str) -> str:
    """The mask of a value with this name: of the variable that the form of the value shows, else of the name."""
    shown = MASK.search(value) or _FORM.search(value)
    variable = (shown[1] if shown.re is MASK else shown.lastgroup) if shown is not None else None
    own = re.sub(r"[^A-Z0-9]+", "_", name.rpartition(".")[2].upper()).strip("_0123456789")
    return f"\0{variable or _VARIABLES.get(own, own) or 'SECRET'}\0"


def _hide(variable: str, value: str) -> str:
    return value if MASK.search(value) or _HARMLESS.fullmatch(value) else f"\0{variable}\0"
