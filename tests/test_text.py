"""Text in and out: codecs, chat templates, and text that streams."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvframe.errors import ConfigError, RequestError
from kvframe.text import ByteTokenizer, Detokenizer, TextCodec

CORPUS = [
    "Once upon a time, there was a cache.",
    "The naïve café — 日本語のテキスト 😀👩‍👩‍👧 the end.",
    "a b  c\n\tdef f(x):",
] * 3
BYTES = TextCodec(vocab_size=1000)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level():
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it; encode() adds <s>."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece():
    """BPE with a metasign for spaces and bytes for what is unknown, as Llama 2 and Mistral have it: decode() drops the
    first space."""
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *"abcdehlnoprtuw,.",
        "▁a",
        "he",
        "▁the",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def bpe():
    return TextCodec(byte_level())


@pytest.fixture(scope="module")
def metaspace():
    return TextCodec(sentencepiece())


def stream(codec, ids, stop=(), context=()) -> tuple[str, Detokenizer]:
    """All deltas together, checked against `text` on the way."""
    detokenizer, got = codec.detokenizer(stop, context), ""
    for token in ids:
        got += detokenizer.push(token)
        assert got == detokenizer.text
        if detokenizer.stopped:
            break
    got += detokenizer.finish()
    assert got == detokenizer.text and detokenizer.finish() == ""
    return got, detokenizer


# -- streaming --------------------------------------------------------------------------------------------------------


some_bytes = st.lists(st.integers(0, 255) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 300]))


@settings(deadline=None)
@given(some_bytes)
@example([0xFF] * 100)
@example([0x80, 0xF0, 0x9F] * 40)
@example([0xFF] * 17 + [0xE2, 0x82, 0xAC])
def test_random_bytes_stream_to_what_decode_gives(ids):
    assert stream(BYTES, ids)[0] == BYTES.decode(ids)


@settings(deadline=None)
@given(st.data())
def test_random_tokens_stream_to_what_decode_gives(bpe, data):
    ids = data.draw(st.lists(st.integers(0, len(bpe.tokenizer) - 1)))
    assert stream(bpe, ids)[0] == bpe.decode(ids)


@settings(deadline=None)
@given(st.text() | st.text(alphabet="ab é😀日\ufffd \n"))
def test_text_survives_encode_and_stream(bpe, text):
    text = text.encode("utf-8", "replace").decode()
    ids = bpe.encode(text)
    assert ids[0] == 0 and stream(bpe, ids)[0] == bpe.decode(ids) == text
    assert stream(BYTES, BYTES.encode(text))[0] == text


@settings(deadline=None)
@given(st.text(alphabet="abcdehlnoprtuw,. é😀日"))
def test_spaces_of_sentencepiece_and_byte_fallback(metaspace, text):
    ids = metaspace.encode(text)
    assert stream(metaspace, ids)[0] == metaspace.decode(ids)
    half = len(ids) // 2
    clean = not metaspace.decode(ids[:half]).endswith("\ufffd")
    if clean and metaspace.decode(ids[:half]):  # with the prompt's last tokens as context, no space is lost
        assert metaspace.decode(ids[:half]) + stream(metaspace, ids[half:], context=ids[:half])[0] == metaspace.decode(
            ids
        )


def test_unfinished_characters_wait():
    detokenizer = BYTES.detokenizer()
    assert [detokenizer.push(b) for b in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    detokenizer.push(0xE2)
    assert detokenizer.finish() == "\ufffd" and detokenizer.text == "a😀b\ufffd"
    assert [BYTES.detokenizer().push(t) for t in (65, 999)] == ["A", "⟨999⟩"]


def test_special_tokens_are_silent_and_cheap(bpe):
    ids = bpe.encode("one two")
    mixed = [0, *ids[:3], *[1] * 5000, *ids[3:], 1]
    detokenizer = bpe.detokenizer()
    assert "".join(map(detokenizer.push, mixed)) + detokenizer.finish() == "one two"
    assert len(detokenizer._window) < 10


@pytest.mark.parametrize("ids", [[0xFF], [0xF0, 0x9F], [65], [300], [0xE2, 0x82, 0xAC]])
def test_cost_per_token_does_not_grow(ids):
    detokenizer, longest = BYTES.detokenizer(["never"]), 0
    for i in range(6000):
        detokenizer.push(ids[i % len(ids)])
        longest = max(longest, len(detokenizer._window))
    assert longest <= 40
    detokenizer.finish()
    assert detokenizer.text == BYTES.decode(ids[i % len(ids)] for i in range(6000))


# -- stop strings -----------------------------------------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> str:
    """Text before the stop string that is complete first, found by reading one character at a time."""
    for end in range(len(text) + 1):
        found = [end - len(s) for s in stops if text[:end].endswith(s)]
        if found:
            return text[: min(found)]
    return text


letters = st.text(alphabet="ab😀é", max_size=30)
stops = st.lists(st.text(alphabet="ab😀é", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=200)
@given(letters, stops)
def test_stop_strings_across_bytes(text, stop):
    got, detokenizer = stream(BYTES, BYTES.encode(text), stop)
    assert got == cut(text, stop) and detokenizer.stopped == any(s in text for s in stop)
    if len(stop) == 1 and stop[0] in text:
        assert got == text[: text.find(stop[0])]
    if detokenizer.stopped:
        assert detokenizer.push(65) == "" and detokenizer.text == got


@settings(deadline=None)
@given(st.text(alphabet="the cað😀\n", max_size=40), st.text(alphabet="the cað😀\n", min_size=1, max_size=5))
def test_stop_strings_across_tokens(bpe, text, stop):
    got, detokenizer = stream(bpe, bpe.encode(text), [stop])
    assert got == text.split(stop)[0] and detokenizer.stopped == (stop in text)


def test_stop_strings_hold_back_only_what_may_be_theirs():
    detokenizer = BYTES.detokenizer(["\n\nUser:", "END"])
    deltas = [detokenizer.push(b) for b in b"a\n\nUs x EN. END. more"]
    assert deltas[:9] == ["a", "", "", "", "", "\n\nUs ", "x", " ", ""]
    assert detokenizer.stopped and detokenizer.text == "a\n\nUs x EN. " and detokenizer.finish() == ""
    assert stream(BYTES, b"abcd", ["bc", "abcd"])[0] == "a"  # "bc" is complete first
    assert stream(BYTES, b"abcd", ["cd", "bcd"])[0] == "a"  # of two that end together, the longest
    assert stream(BYTES, b"stop", ["stop"])[0] == ""


# -- codecs -----------------------------------------------------------------------------------------------------------


def test_byte_tokenizer():
    assert BYTES.encode("é!") == [0xC3, 0xA9, 33] and BYTES.decode([0xC3, 0xA9, 256, 33]) == "é⟨256⟩!"
    assert ByteTokenizer(64).decode([50]) == "2"  # output can be shown all the same
    with pytest.raises(ConfigError, match="vocab_size=64.*\n.*prompt_tokens"):
        TextCodec(vocab_size=64).encode("x")
    with pytest.raises(RequestError, match="prompt=5"):
        BYTES.encode(5)


def test_chat(bpe):
    tokenizer = byte_level()
    codec = TextCodec(tokenizer)
    messages = [{"role": "user", "content": "a time"}]
    with pytest.raises(RequestError, match="no chat template"):
        codec.chat(messages)
    with pytest.raises(RequestError, match="no chat template"):
        BYTES.chat(messages)
    tokenizer.chat_template = TEMPLATE
    ids = codec.chat(messages)
    assert ids.count(0) == 1 and ids[0] == 0  # one BOS: the template's
    assert codec.decode(ids) == "user: a time\nassistant:" and all(type(i) is int for i in ids)
    with pytest.raises(RequestError, match="refuses the messages: no aliens"):
        codec.chat([{"role": "alien", "content": "x"}])


@pytest.mark.parametrize("wrap", [lambda ids: {"input_ids": [ids]}, lambda ids: [ids], lambda ids: ids])
def test_chat_accepts_what_any_transformers_version_answers(wrap):
    class Fake:
        chat_template = "x"

        def apply_chat_template(self, messages, **_):
            return wrap([1, 2, 3])

    assert TextCodec(Fake()).chat([{"role": "user", "content": [{"type": "text", "text": "x"}]}]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hello", "messages='hello'"),
        ([], r"messages=\[\]"),
        ([{"role": "user", "content": "x"}, "y"], r"messages\[1\]='y'"),
        ([{"content": "x"}], r"messages\[0\] has role=None"),
        ([{"role": "user"}], r"messages\[0\] \(role 'user'\) has content=None"),
        ([{"role": "user", "content": 5}], "content=5"),
    ],
)
def test_malformed_messages_are_named(bpe, messages, named):
    with pytest.raises(RequestError, match=named):
        bpe.chat(messages)
