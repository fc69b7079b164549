"""Text and ids: round trips, deltas without half characters, chat templates, broken files."""

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdnode.errors import BadRequest, ConfigError
from pdnode.models.tokenizer import Tokenizer
from tests.support.model import smollm2_dir
from tests.support.tiny_model import write_tiny_tokenizer

TEXTS = (
    "plain words",
    " leading and trailing ",
    "emoji 🙂 and a family 👩‍👩‍👧 of them",
    "汉字 and é and ﷽",
    "digits 12345\n\ttabs",
    "<|im_start|> is a control token",
    "\ufffd is a character of its own",
)


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.load(smollm2_dir())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(path)
    return Tokenizer.load(path)


def deltas(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_with_both_vocabularies(real: Tokenizer, tiny: Tokenizer, text: str) -> None:
    for tokenizer in (real, tiny):
        tokens = tokenizer.encode(text)
        wanted = text.replace("<|im_start|>", "")
        assert tokenizer.decode(tokens) == wanted
        assert "".join(deltas(tokenizer, tokens)) == wanted


def test_a_character_comes_whole_with_its_last_token(tiny: Tokenizer) -> None:
    """The tiny vocabulary has single bytes only: an emoji is four tokens."""
    tokens = tiny.encode("a🙂b")
    assert len(tokens) == 6
    assert deltas(tiny, tokens) == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_never_ends_shows_at_the_flush(tiny: Tokenizer) -> None:
    tokens = tiny.encode("a🙂")[:-1]
    assert deltas(tiny, tokens) == ["a", "", "", "", "\ufffd"]
    assert tiny.decode(tokens) == "a\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows(tiny: Tokenizer) -> None:
    tokens = [*tiny.encode("🙂")[:2], *tiny.encode("x")]
    assert deltas(tiny, tokens) == ["", "", "\ufffdx", ""]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 49_151), max_size=40))
def test_deltas_joined_are_the_text_of_all_tokens(tokens: list[int]) -> None:
    tokenizer = _real()
    assert "".join(deltas(tokenizer, tokens)) == tokenizer.decode(tokens)
    # The library that made the vocabulary decodes the same.
    assert tokenizer.decode(tokens) == tokenizer._fast.decode(tokens, skip_special_tokens=True)


_CACHE: list[Tokenizer] = []


def _real() -> Tokenizer:
    if not _CACHE:
        _CACHE.append(Tokenizer.load(smollm2_dir()))
    return _CACHE[0]


def test_ids_of_the_real_model(real: Tokenizer) -> None:
    """As transformers gives them for this prompt (digits one by one, no start of text added)."""
    chat = [{"role": "user", "content": "What is the capital of France? 12345 🙂é"}]
    assert real.encode_chat(chat) == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018),
        *(411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47),
        *(216, 33, 34, 35, 36, 37, 47526, 2756, 2, 198, 1, 520, 9531, 198),
    ]
    assert real.end_tokens == {2}
    assert real.vocabulary == 49_152
    assert real.decode([1, 2, 4649]) == " France"
    assert real.token_bytes(10**6) == b""


def test_template_errors_belong_to_the_request(real: Tokenizer, tiny: Tokenizer) -> None:
    with pytest.raises(BadRequest) as caught:
        real.render_chat([{"role": "user", "content": 5}])
    assert caught.value.param == "messages"
    assert tiny.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def with_template(path: Path, template: object) -> Tokenizer:
    write_tiny_tokenizer(path)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return Tokenizer.load(path)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRequest, match="unsafe"):
        with_template(tmp_path, source).render_chat([])


def test_templates_refuse_in_their_own_words(tmp_path: Path) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="roles must alternate"):
        with_template(tmp_path, source).render_chat([])


def test_templates_see_special_tokens_and_json(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ bos_token }}{{ messages | tojson }}")
    assert tokenizer.render_chat([{"a": "é"}]) == '<|im_start|>[{"a": "é"}]'


def test_a_broken_template_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        with_template(tmp_path, "{% if %}")


def test_no_template_is_said_to_the_client(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(BadRequest, match="no chat template"):
        tokenizer.encode_chat([])


def test_end_tokens_come_from_the_nearest_file(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert Tokenizer.load(tmp_path).end_tokens == {2}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(tmp_path).end_tokens == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert Tokenizer.load(tmp_path).end_tokens == {8, 9}


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is no tokenizer"):
        Tokenizer.load(tmp_path)
    write_tiny_tokenizer(tmp_path)
    raw = json.loads(path.read_text())
    path.write_text(
        json.dumps(raw | {"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}})
    )
    with pytest.raises(ConfigError, match="decoder 'WordPiece' is not supported"):
        Tokenizer.load(tmp_path)


def test_the_tokenizer_needs_no_torch() -> None:
    code = "import sys, pdnode.models.tokenizer, pdnode.models.fingerprint, pdnode.models.fetch\n"
    code += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
