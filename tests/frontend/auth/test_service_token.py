"""The service token: read again when its file changes, the first sent, all accepted."""

from pathlib import Path

import pytest

from phalanx_frontend.auth.service_token import READ_INTERVAL_S, ServiceToken, is_bearer, open_token, read_tokens


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def mounted(folder: Path, text: str) -> Path:
    """A file behind a link, as a kubelet replaces it."""
    target = folder / f"version-{len(list(folder.iterdir()))}"
    target.write_text(text)
    link = folder / "token"
    (folder / "new").symlink_to(target)
    (folder / "new").replace(link)
    return link


def test_a_rotation_replaces_the_token(tmp_path: Path) -> None:
    file, clock = mounted(tmp_path, "former\n"), Clock()
    token = ServiceToken(read_tokens(file), file, clock)
    for text, accepted in (("former\nnew\n", ("former", "new")), ("new\nformer", ("new", "former")), ("new", ("new",))):
        before = token.accepted
        mounted(tmp_path, text)
        assert token.accepted == before  # the file is not read for each connection
        clock.now_s += READ_INTERVAL_S
        assert token.accepted == accepted and token.current == accepted[0]


@pytest.mark.parametrize("text", ["", "\n \n", "\udcff"])
def test_an_unusable_file_changes_nothing(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = mounted(tmp_path, "former"), Clock()
    token = ServiceToken(read_tokens(file), file, clock)
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    clock.now_s += READ_INTERVAL_S
    assert token.accepted == ("former",) and "unusable" in caplog.text
    file.unlink()
    clock.now_s += READ_INTERVAL_S
    assert token.current == "former"


def test_a_start_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="token"):
        open_token(tmp_path / "token")
    with pytest.raises(ValueError, match="empty"):
        open_token(mounted(tmp_path, " \n"))
    assert open_token(mounted(tmp_path, "a\nb")).accepted == ("a", "b")


@pytest.mark.parametrize(
    ("authorization", "is_accepted"),
    [(b"Bearer a", True), (b"Bearer b", True), (b"Bearer c", False), (b"a", False), (b"", False), (b"Bearer a\nb", False)],
)
def test_all_tokens_of_the_file_are_accepted(authorization: bytes, is_accepted: bool) -> None:
    assert is_bearer(authorization, ("a", "b")) is is_accepted
