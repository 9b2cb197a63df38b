"""Which secrets are replaced, which look-alikes stay."""

from __future__ import annotations

import pytest

from laneformer.data.scrub import PersonalData, SecretScrubber

# Put together here, so that no scanner takes this file for a leak.
KEY_BODY = "MIIEpAIBAAKCAQEA" + "abcDEF123/+" * 8
SECRETS = {
    "private key": f"-----BEGIN RSA PRIVATE {'KEY'}-----\n{KEY_BODY}\n-----END RSA PRIVATE {'KEY'}-----",
    "AWS key id": "AKIA" + "IOSFODNN7EXAMPLE",
    "GitHub token": "ghp" + "_" + "a1B2" * 9,
    "Slack token": "xoxb" + "-123456789012-abcdefABCDEF",
    "Google key": "AIza" + "Sy0123456789abcdefghijklmnopqrstuvw",
    "Hugging Face token": "hf" + "_" + "aBcDeFgHiJ" * 3 + "kLmN",
    "OpenAI key": "sk" + "-proj-" + "a1B2c3D4e5" * 5,
    "Stripe key": "sk" + "_live_" + "a1B2c3D4e5" * 3,
    "JWT": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_replaced_and_counted_and_the_rest_stays(kind: str) -> None:
    scrubber = SecretScrubber()
    text = scrubber.format(f"before = 1\nx = '''{SECRETS[kind]}'''\nafter = 2\n")
    secret = KEY_BODY if kind == "private key" else SECRETS[kind]
    assert secret not in text
    assert f"REMOVED_{kind.upper().replace(' ', '_')}" in text
    assert text.startswith("before = 1\nx = '''") and text.endswith("'''\nafter = 2\n")
    assert {key: int(stat.total) for key, stat in scrubber.stats.stats.items()} == {f"removed {kind}": 1}


def test_an_aws_secret_goes_but_a_path_of_its_length_stays() -> None:
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    assert SecretScrubber().format(f'aws_secret = "{secret}"') == 'aws_secret = "REMOVED_AWS_SECRET"'
    path = 'aws_path = "abcdefghij/abcdefghij/abcdefghij/abcdefg"'
    assert SecretScrubber().format(path) == path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('password = "x9Kq2mPz7LwV4t"', 'password = "REMOVED_PASSWORD"'),
        ("'api_key': 'x9Kq2mPz7LwV4t'", "'api_key': 'REMOVED_PASSWORD'"),
        ('password = "password123"', 'password = "password123"'),
        ('token = "endoftextmarker"', 'token = "endoftextmarker"'),
        ('secret_name = "{random9Kq2mPz7}"', 'secret_name = "{random9Kq2mPz7}"'),
        ('colour = "x9Kq2mPz7LwV4t"', 'colour = "x9Kq2mPz7LwV4t"'),
    ],
)
def test_only_what_looks_random_is_a_password(text: str, expected: str) -> None:
    assert SecretScrubber().format(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jane.doe@corp.co.uk now", "write to email@example.com now"),
        ("y = self.A@self.B.T", "y = self.A@self.B.T"),
        ("y = x@w.mean(0)", "y = x@w.mean(0)"),
        ("git clone git@github.com:a/b", "git clone git@github.com:a/b"),
        ("@app.route\ndef f(): ...", "@app.route\ndef f(): ..."),
        ("host = '8.8.8.8'", "host = '192.0.2.1'"),
        ("host = '192.168.0.1'", "host = '192.168.0.1'"),
        ("oid = 1.3.6.1.5.5.7.3.1", "oid = 1.3.6.1.5.5.7.3.1"),
    ],
)
def test_addresses_of_people_and_public_hosts_go_and_code_stays(text: str, expected: str) -> None:
    assert PersonalData().format(text) == expected


def test_addresses_are_counted_by_kind() -> None:
    block = PersonalData()
    block.format("a.b@c.org d@e.net email@example.com 9.9.9.9 10.0.0.1")
    counts = {key: int(stat.total) for key, stat in block.stats.stats.items()}
    assert counts == {"removed e-mail address": 2, "removed IP address": 1}
