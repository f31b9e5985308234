"""`kubectl phalanx key`."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys, Quota, gather_keys
from phalanx_kubectl.__main__ import main


def made(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["key", "team", *flags])
    assert ended.value.code == 0
    return capsys.readouterr().out


def read(folder: Path, entry: str) -> ApiKey:
    """Returns the key that a server reads from an entry."""
    file = folder / "keys"
    file.write_text(f"[{entry}]")
    [key] = gather_keys((), file)
    return key


def test_a_server_accepts_the_made_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, key, _, entry = (line.strip() for line in made(capsys).splitlines())
    assert key not in entry
    assert ApiKeys([read(tmp_path, entry)]).find(f"Bearer {key}".encode()) is not None
    assert made(capsys) != made(capsys)


def test_all_fields_reach_the_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = [*("--models", "a", "b"), *("--expires", "2030-01-01T01:00:00+01:00"), *("--priority", "-3"), "--console"]
    flags += ["--requests-per-minute", "1", "--tokens-per-minute", "2", "--concurrent", "3"]
    flags += ["--requests-per-day", "4", "--tokens-per-day", "5", "-o", "json"]
    document = json.loads(made(capsys, *flags))
    key = read(tmp_path, json.dumps(document["entry"]))
    assert (key.name, key.models, key.priority, key.may_write_console) == ("team", ("a", "b"), -3, True)
    assert (key.expires, key.quota) == (datetime(2030, 1, 1, tzinfo=UTC), Quota(1, 2, 3, 4, 5))
    assert ApiKeys([key]).find(f"Bearer {document['key']}".encode()) == key


def test_expiry_may_be_days_from_now(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads(made(capsys, "--expires", "90d", "-o", "json"))
    expires = read(tmp_path, json.dumps(document["entry"])).expires
    assert expires is not None and abs(expires - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=5)


@pytest.mark.parametrize("flags", [["--expires", "soon"], ["--expires", "2030-01-01T00:00:00"], ["--tokens-per-day", "0"]])
def test_an_invalid_flag_is_refused_by_name(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["key", "team", *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert flags[0] in error and flags[1] in error
