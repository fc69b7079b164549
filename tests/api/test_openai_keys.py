"""API keys: which routes want one, what a wrong one gets, and that a reload renews them."""

from pathlib import Path

import pytest

from pdnode.api.app import reload_app
from pdnode.config import ApiConfig
from pdnode.secretfile import SecretError, read_keys
from tests.support.fake_service import serve

KEY, SECOND = b"sk-0123456789abcdef", b"sk-fedcba9876543210"
COMPLETION = {"model": "tiny", "prompt": "hi"}


def bearer(key: bytes) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.decode()}"}


async def status(bench, headers: dict[str, str]) -> tuple[int, dict]:  # noqa: ANN001
    url = f"{bench.url}/v1/completions"
    async with bench.client.post(url, json=COMPLETION, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_without_keys_everybody_may() -> None:
    async with serve() as bench:
        assert (await status(bench, {}))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(b"sk-0123456789abcdeg"),
        {"Authorization": KEY.decode()},
        {"Authorization": f"Basic {KEY.decode()}"},
        {"Authorization": "Bearer"},
    ],
)
async def test_a_request_without_a_known_key(headers: dict[str, str]) -> None:
    async with serve(keys=(KEY, SECOND)) as bench:
        async with bench.client.get(f"{bench.url}/v1/models", headers=headers) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            error = (await answer.json())["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert KEY.decode() not in error["message"]


async def test_every_key_opens_and_probes_need_none() -> None:
    async with serve(keys=(KEY, SECOND)) as bench:
        for key in (KEY, SECOND):
            assert (await status(bench, bearer(key)))[0] == 200
        for route in ("health", "readyz", "metrics", "version"):
            async with bench.client.get(f"{bench.url}/{route}") as answer:
                assert answer.status == 200


async def test_a_reload_renews_the_keys() -> None:
    async with serve(keys=(KEY,)) as bench:
        reload_app(bench.app, ApiConfig(keys=(SECOND,)))
        assert (await status(bench, bearer(KEY)))[0] == 401
        assert (await status(bench, bearer(SECOND)))[0] == 200


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"# of team a\n" + KEY + b"\r\n\n  " + SECOND + b"  \n")
    path.chmod(0o600)
    assert read_keys(str(path)) == (KEY, SECOND)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# none\n", "has 0 keys; 1..64 are taken"),
        ("short\n", "key 1 is not 16..512 printable characters without spaces"),
        ("sk-0123456789abcdef\nsk-0123456789 abcdef\n", "key 2 is not"),
        ("sk-0123456789abcdef\n" * 65, "has 65 keys"),
    ],
)
def test_files_that_are_no_keys(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SecretError) as caught:
        read_keys(str(path))
    assert problem in str(caught.value)
    assert "0123456789" not in str(caught.value)
