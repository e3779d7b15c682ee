"""What is a secret, and what replaces it in words, texts, JSON and commands to paste."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from hf_memkit.common.commands import command
from hf_memkit.common.secrets import masked, masked_json

TOKEN = "hf_" + "aB3" * 12

SECRETS = {
    "--hub_token S3cr3t": "--hub_token $HF_TOKEN",
    "--hub_token=S3cr3t --lr 1": "--hub_token=$HF_TOKEN --lr 1",
    "--api-key S3cr3t": "--api-key $API_KEY",
    "--wandb_key S3cr3t": "--wandb_key $WANDB_API_KEY",
    "--set hub_token=S3cr3t": "--set hub_token=$HF_TOKEN",
    "--set arguments.hub_token=S3cr3t": "--set arguments.hub_token=$HF_TOKEN",
    "HF_TOKEN=S3cr3t WANDB_API_KEY=S3cr3t python t.py": "HF_TOKEN=$HF_TOKEN WANDB_API_KEY=$WANDB_API_KEY python t.py",
    "AWS_SECRET_ACCESS_KEY=S3cr3t": "AWS_SECRET_ACCESS_KEY=$AWS_SECRET_ACCESS_KEY",
    "--db_password 'two S3cr3ts'": "--db_password '$DB_PASSWORD'",
    "--password 123456 --pin_secret $ecret": "--password $PASSWORD --pin_secret $PIN_SECRET",
    "export OPENAI_KEY=S3cr3t; python": "export OPENAI_KEY=$OPENAI_KEY; python",
    "Arguments(hub_token='S3cr3t', eos_token='</s>')": "Arguments(hub_token='$HF_TOKEN', eos_token='</s>')",
    """{"api_key": "S3cr3t", 'n': 1}""": """{"api_key": "$API_KEY", 'n': 1}""",
    "hub_token: S3cr3t_S3cr3t": "hub_token: $HF_TOKEN",
    'hub_token = "S3cr3t"': 'hub_token = "$HF_TOKEN"',
    "https://me:S3cr3t@host/x": "https://me:$PASSWORD@host/x",
    "https://host/x?token=S3cr3t&page=2": "https://host/x?token=$URL_TOKEN&page=2",
    "Authorization: Bearer S3cr3tS3cr3tS3cr3t": "Authorization: Bearer $TOKEN",
    f"sent {TOKEN}, then": "sent $HF_TOKEN, then",
    f"--wandb-key {'0a1b2c3d4e' * 4}": "--wandb-key $WANDB_API_KEY",
    f"run_key={'0a1b2c3d4e' * 4}": "run_key=$RUN_KEY",
    "'--hub_token=two S3cr3ts' x": "'--hub_token=$HF_TOKEN' x",
}
"""Text with a secret → without."""

HARMLESS = (
    "--tokenizer_name gpt2 --max_tokens 5 --max_new_tokens 64",
    "--eos_token '</s>' --pad_token '<pad>' --image_token img --sort_key length --dataset_key text",
    "--push_to_hub_token --use_auth_token True --hub_token <HUB_TOKEN> --token $HF_TOKEN",
    "num_input_tokens_seen=5,000 tokens: 12,288 key=zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "a token: a piece of a word. KeyError: 'model.embed_tokens.weight'. https://host:8080/a@b",
    "commit e3451e96e3451e96e3451e96e3451e96e3451e96 of git+https://github.com/a/b@main, hf_memkit_prediction_child",
    '{"key": "a", "tokens": "many", "token": null, "hub_token": ""}',
)


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_replaced_by_its_variable(text: str) -> None:
    assert masked(text) == SECRETS[text] and "S3cr3t" not in SECRETS[text]
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_resembles_a_secret_stays(text: str) -> None:
    assert masked(text) == text and masked_json(text.split()) == text.split()


def test_json_has_none_under_its_keys_and_in_its_commands() -> None:
    content = {
        "arguments": ["--hub_token", "S3cr3t", "--lr", "1"],
        "hub_token": "S3cr3t",
        "deep": [{"environment": {"WANDB_API_KEY": "S3cr3t", "PATH": "/bin"}}, 1.5, None],
        "tokens": 5,
    }
    assert masked_json(content) == {
        "arguments": ["--hub_token", "$HF_TOKEN", "--lr", "1"],
        "hub_token": "$HF_TOKEN",
        "deep": [{"environment": {"WANDB_API_KEY": "$WANDB_API_KEY", "PATH": "/bin"}}, 1.5, None],
        "tokens": 5,
    }
    assert content["hub_token"] == "S3cr3t", "the content itself is unchanged"


@pytest.mark.parametrize(
    "words",
    [
        ("--hub_token", "S3cr3t"),
        ("--api-key=S3cr3t", "a b"),
        ("it's", "--set", "hub_token=S3cr3t"),
        ("--config", '{"hub_token": "S3cr3t", "b": "it\'s $HOME"}'),
        ("https://me:S3cr3t@host/$(x)",),
    ],
)
def test_a_pasted_command_has_the_same_words(words: tuple[str, ...]) -> None:
    """A real shell reads it; would notice: a mask that the shell does not replace, or a word that it splits."""
    line = command("printf", "%s\\n", *words)
    assert "S3cr3t" not in line
    variables = dict.fromkeys(("HF_TOKEN", "API_KEY", "PASSWORD"), "S3cr3t")
    ran = subprocess.run(["/bin/sh", "-c", line], env=variables, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == list(words)


def test_a_command_without_secrets_is_quoted_as_usual() -> None:
    words = ["memkit", "run", "my job", "$(touch x)", "a;b", ""]
    assert command(*words) == shlex.join(words)
    assert "\n" not in command("rm", "two\nlines") and "\x1b" not in command("rm", "\x1b[2J")
