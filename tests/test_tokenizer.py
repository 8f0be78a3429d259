"""The tokenizer against transformers on small ones built here: chats, begin and end tokens, both kinds of file."""

import io
import json
import os
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from dph.errors import UserError
from dph.tokenizer import Tokenizer, load_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

TEXT = [
    "What is 7 times 8? It is 56.",
    "Natalia sold 48 clips in April, half as many in May.",
    "fünf, 日本; a b ab\n\n",
] * 9
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
LLAMA3_TEMPLATE = (
    "{% for message in messages %}"
    "{% set header = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' %}"
    "{% set content = header + message.content + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 7 times 8?"}],
    [{"role": "user", "content": " Leading, trailing \n"}, {"role": "assistant", "content": "It is 56."}] * 2
    + [{"role": "user", "content": "fünf 日本 <|eot_id|></s>a"}],
]


def llama3(folder: Path, **config: Any) -> Path:
    """Byte-level BPE whose post-processor adds the begin token, as Llama 3's does."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=330, special_tokens=LLAMA3_SPECIAL, initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write(folder / "tokenizer_config.json", {**named, "chat_template": LLAMA3_TEMPLATE, **config})
    return folder


def llama2(folder: Path, text: list[str] = TEXT, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """tokenizer.model alone, BPE with bytes for what it does not know, as Llama 2's."""
    model = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True, "character_coverage": 1.0} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    if config is not None:
        write(folder / "tokenizer_config.json", config)
    return folder


def write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def theirs(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def rendered(folder: Path, template: str, content: str = "hi") -> str:
    """What a template writes, seen through a tokenizer that loses nothing."""
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(llama3(folder))
    return tokenizer.decode(tokenizer.chat([{"role": "user", "content": content}]))


# tokenizer.json


@pytest.mark.parametrize("chat", CHATS)
def test_a_llama3_chat_is_that_of_transformers_and_begins_once(tmp_path: Path, chat: list[dict[str, str]]) -> None:
    tokenizer = load_tokenizer(llama3(tmp_path))
    ids = tokenizer.chat(chat)
    assert ids == theirs(tmp_path, chat)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


def test_encode_adds_nothing_and_recognises_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama3(tmp_path))
    assert tokenizer.encode("<|begin_of_text|><|eot_id|>") == [0, 1]
    assert tokenizer.encode("a") == [tokenizer.encode("<|eot_id|>a")[1]]
    assert tokenizer.encode("") == []


def test_decode_leaves_out_special_tokens_and_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama3(tmp_path))
    text = "It is 56: fünf, 日本."
    assert tokenizer.decode([0, *tokenizer.encode(text), 1, tokenizer.vocab_size, 10**6]) == text
    assert tokenizer.decode([]) == ""


def test_truncation_and_padding_in_the_file_are_not_ours(tmp_path: Path) -> None:
    plain = load_tokenizer(llama3(tmp_path)).encode(TEXT[0])
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.enable_truncation(4)
    made.enable_padding(length=100)
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT[0]) == plain


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    before = load_tokenizer(llama3(tmp_path)).vocab_size
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens(["<|new|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == before + 1
    assert load_tokenizer(tmp_path).encode("<|new|>") == [before]


def test_tokens_named_in_the_config_are_special_even_if_the_file_does_not_say_so(tmp_path: Path) -> None:
    folder = llama3(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<|eot_id|>"]
    write(folder / "tokenizer.json", data)
    tokenizer = load_tokenizer(folder)
    assert (
        tokenizer.encode("<|eot_id|>")
        == [1]
        == transformers.AutoTokenizer.from_pretrained(folder).encode("<|eot_id|>", add_special_tokens=False)
    )
    assert tokenizer.decode([1]) == ""


def test_tokenizer_json_wins_over_tokenizer_model(tmp_path: Path) -> None:
    llama2(tmp_path)
    assert load_tokenizer(llama3(tmp_path)).encode("<|eot_id|>") == [1]


# tokenizer.model


@pytest.mark.parametrize("chat", CHATS)
def test_a_llama2_chat_is_that_of_transformers(tmp_path: Path, chat: list[dict[str, str]]) -> None:
    tokenizer = load_tokenizer(llama2(tmp_path, config={"chat_template": LLAMA2_TEMPLATE}))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    scores = {pieces.id_to_piece(i): pieces.get_score(i) for i in range(len(pieces))}
    vocabulary = {piece: i for i, piece in enumerate(scores)}
    merges = transformers.tokenization_utils_base.generate_merges(vocabulary, scores)
    oracle = transformers.LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=True, chat_template=LLAMA2_TEMPLATE)
    ids = tokenizer.chat(chat)
    assert ids == oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids[0] == tokenizer.bos_id == 1


def test_sentencepiece_text_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama2(tmp_path))
    for text in ("It is 56: fünf 日本 ☃", " two  blanks ", "\n\n", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_pieces_in_text_are_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama2(tmp_path))
    assert tokenizer.encode("<s>a</s>") == [1, *tokenizer.encode("a"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2]) == "a"


def test_added_tokens_follow_the_model(tmp_path: Path) -> None:
    folder = llama2(tmp_path)
    size = load_tokenizer(folder).vocab_size
    decoder = {str(size + 2): {"content": "<sep>", "special": True}, "1": {"content": "<s>", "special": True}}
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, "eos_token": "<sep>"})
    write(folder / "added_tokens.json", {"<tool>": size, "<tool>2": size + 1})
    tokenizer = load_tokenizer(folder)
    a = tokenizer.encode("a")
    assert tokenizer.encode("a<tool>a<sep>") == [*a, size, *a, size + 2]
    assert tokenizer.encode("<tool>2") == [size + 1]  # the longest counts
    assert tokenizer.decode([*a, size, *a, size + 2, size + 3]) == "a<tool>a"
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.end_ids == (size + 2,)


def test_a_model_without_begin_token_has_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama2(tmp_path, bos_id=-1))
    assert tokenizer.bos_id is None
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a")


def test_decoding_is_not_undone_by_encoding(tmp_path: Path) -> None:
    """With a, b and ab in the vocabulary, [a, b] and [ab] are one text: responses are ids, never encoded again."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"eos_token": "</s>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([2]) == "ab"
    assert tokenizer.encode("ab") == [2]
    assert tokenizer.decode([0, 1]).replace(" ", "") == "ab"


# Tokens that other files add


def entry(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "special": False, "normalized": False, **flags}


ADDED = "a <think>b</think>c<sep> d <mask>e Ġclips"  # with every token below in it
MASK = {"__type": "AddedToken", "content": "<mask>", "special": True, "normalized": False, "lstrip": True}
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {  # files by name, the first free id is given
    "special in the decoder": lambda free: {
        "tokenizer_config.json": {"added_tokens_decoder": {str(free): entry("<sep>", special=True)}}
    },
    "text in the decoder": lambda free: {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(free + 1): entry("</think>"), str(free): entry("<think>")}
        }
    },
    "that takes the blanks on its left": lambda free: {
        "tokenizer_config.json": {"added_tokens_decoder": {str(free): entry("<mask>", lstrip=True)}}
    },
    "that takes the blanks on its right": lambda free: {
        "tokenizer_config.json": {"added_tokens_decoder": {str(free): entry("<sep>", special=True, rstrip=True)}}
    },
    "in added_tokens.json": lambda free: {"added_tokens.json": {"<think>": free, "<sep>": free + 1}},
    "special in added_tokens.json": lambda free: {
        "added_tokens.json": {"<sep>": free},
        "tokenizer_config.json": {"additional_special_tokens": ["<sep>"]},
    },
    "additional without an id": lambda free: {
        "tokenizer_config.json": {
            "additional_special_tokens": ["<sep>", {"__type": "AddedToken", **entry("<mask>", special=True)}]
        }
    },
    "additional by a name of its own": lambda free: {
        "tokenizer_config.json": {"extra_special_tokens": {"sep_of_mine": "<sep>"}}
    },
    "a begin token that only the config knows": lambda free: {"tokenizer_config.json": {"bos_token": "<sep>"}},
    "an end token that the decoder does not call special": lambda free: {
        "tokenizer_config.json": {
            "eos_token": "<sep>",
            "added_tokens_decoder": {str(free): entry("<sep>", lstrip=True)},
        }
    },
    "one of the vocabulary": lambda free: {"tokenizer_config.json": {"additional_special_tokens": ["Ġclips"]}},
}


def with_settings(folder: Path, build: Callable[..., Path], files: dict[str, Any]) -> Path:
    build(folder)
    for name, content in files.items():
        path = folder / name
        write(path, (json.loads(path.read_text()) if path.exists() else {}) | content)
    return folder


@pytest.mark.parametrize("how", SETTINGS)
def test_a_token_that_only_the_settings_know_is_one_as_in_transformers(tmp_path: Path, how: str) -> None:
    before = load_tokenizer(llama3(tmp_path))
    tokenizer = load_tokenizer(with_settings(tmp_path, llama3, SETTINGS[how](before.vocab_size)))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(ADDED)
    assert ids == oracle.encode(ADDED, add_special_tokens=False)
    assert ids != before.encode(ADDED)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.vocab_size == len(oracle)


def test_what_all_files_say_alike_is_added_once(tmp_path: Path) -> None:
    free = load_tokenizer(llama3(tmp_path)).vocab_size
    decoder = {str(free): entry("<sep>", special=True), "1": entry("<|eot_id|>", special=True)}
    files = {
        "added_tokens.json": {"<sep>": free},
        "tokenizer_config.json": {
            "added_tokens_decoder": decoder,
            "additional_special_tokens": ["<sep>", "<|eot_id|>"],
        },
    }
    tokenizer = load_tokenizer(with_settings(tmp_path, llama3, files))
    assert tokenizer.encode("<sep><|eot_id|>") == [free, 1]
    assert tokenizer.vocab_size == free + 1


@pytest.mark.parametrize("build", [llama2, llama3])
def test_a_padding_token_that_nothing_writes_takes_no_place(tmp_path: Path, build: Callable[..., Path]) -> None:
    free = load_tokenizer(build(tmp_path)).vocab_size
    named = {"tokenizer_config.json": {"pad_token": "[PAD]", "unk_token": "[UNK]"}}
    assert load_tokenizer(with_settings(tmp_path, build, named)).vocab_size == free


def test_sentencepiece_takes_a_named_token_for_special_and_gives_a_new_one_the_next_id(tmp_path: Path) -> None:
    free = load_tokenizer(llama2(tmp_path)).vocab_size
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<sep>", "unk_token": "<unk>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_ids == (free,)
    assert tokenizer.encode("a<sep><unk>") == [*tokenizer.encode("a"), free, 0]
    assert tokenizer.decode([0, free]) == ""


@pytest.mark.parametrize(
    ("build", "given", "complaint"),
    [
        (llama3, {"<sep>": 1000}, r"'<sep>' has the id 1000 .* but 324 by tokenizer\.json"),
        (llama3, {"<sep>": 5}, r"'<sep>' has the id 5 .* but 324"),
        (llama3, {"<|eot_id|>": 324}, r"'<\|eot_id\|>' has the id 324 .* but 1 by"),
        (llama2, {"</s>": 7}, r"'</s>' has the id 7 .* but 2 by tokenizer\.model"),
        (llama3, {"<sep>": 324, "<x>": 324}, r"'<x>' and '<sep>' have the same id 324"),
        (llama2, {"<sep>": -1}, r"added_tokens\.json: .*'<sep>' has the id -1; it should be a whole number"),
        (llama2, {"<sep>": "340"}, r"has the id '340'; it should be a whole number"),
        (llama2, {"<sep>": True}, r"has the id True; it should be a whole number"),
        (llama2, {"": 340}, r"is ''; it should be a text"),
    ],
)
def test_an_id_that_does_not_fit_is_an_error(
    tmp_path: Path, build: Callable[..., Path], given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        load_tokenizer(with_settings(tmp_path, build, {"added_tokens.json": given}))
    assert "\n" not in str(caught.value)


ODD = [3, True, [1], {"id": 1}, {"content": 3}, {"content": ""}, {"content": "a", "lstrip": "no"}, "\ud83d"]


@pytest.mark.parametrize("build", [llama2, llama3])
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_token_of_another_type_is_named(tmp_path: Path, build: Callable[..., Path], odd: Any) -> None:
    spelled = [
        ({"eos_token": odd}, "eos_token"),
        ({"pad_token": odd}, "pad_token"),
        ({"additional_special_tokens": [odd]}, r"additional_special_tokens\[0\]"),
        ({"added_tokens_decoder": {"340": odd}}, r"added_tokens_decoder\['340'\]"),
    ]
    for settings, named in spelled:
        build(tmp_path)
        write(tmp_path / "tokenizer_config.json", settings)
        with pytest.raises(UserError, match=named) as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "odd", [3, "x", [1], {"x": entry("<sep>")}, {"-1": entry("<sep>")}, {"9" * 20: entry("<sep>")}]
)
def test_an_odd_added_tokens_decoder_is_named(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        load_tokenizer(llama3(tmp_path, added_tokens_decoder=odd))


def test_additional_tokens_that_are_no_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="additional_special_tokens is '<sep>'; it should be a list"):
        load_tokenizer(llama3(tmp_path, additional_special_tokens="<sep>"))


def test_sentencepiece_strips_the_blanks_that_an_added_token_takes(tmp_path: Path) -> None:
    size = load_tokenizer(llama2(tmp_path)).vocab_size
    decoder = {str(size): entry("<l>", lstrip=True), str(size + 1): entry("<r>", rstrip=True)}
    write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": decoder, "eos_token": "</s>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a  <l> b") == [*tokenizer.encode("a"), size, *tokenizer.encode(" b")]
    assert tokenizer.encode("a <r> \n b") == [*tokenizer.encode("a "), size + 1, *tokenizer.encode("b")]


# What is graded


def special(folder: Path, build: Callable[..., Path]) -> tuple[Tokenizer, int]:
    """A tokenizer with the special token <sep>, and a token that is no special one, <think>."""
    free = load_tokenizer(build(folder)).vocab_size
    decoder = {str(free): entry("<sep>", special=True), str(free + 1): entry("<think>")}
    end = "</s>" if build is llama2 else "<|eot_id|>"
    files = {"tokenizer_config.json": {"added_tokens_decoder": decoder, "eos_token": end}}
    return load_tokenizer(with_settings(folder, build, files)), free


@pytest.mark.parametrize("build", [llama2, llama3])
def test_an_answer_is_its_text_before_the_first_special_token(tmp_path: Path, build: Callable[..., Path]) -> None:
    tokenizer, sep = special(tmp_path, build)
    (end,) = tokenizer.end_ids
    one, two = tokenizer.encode("\\boxed{1"), tokenizer.encode("2}")
    assert tokenizer.answer_text([*one, *two, end]) == tokenizer.decode([*one, *two])
    assert tokenizer.answer_text([*one, sep, *two, end]) == "\\boxed{1"
    assert tokenizer.answer_text([*one, tokenizer.vocab_size + 3, *two, end]) == "\\boxed{1"
    assert tokenizer.answer_text([end]) == tokenizer.answer_text([sep, *one]) == tokenizer.answer_text([]) == ""


@pytest.mark.parametrize("build", [llama2, llama3])
def test_a_further_turn_is_not_what_is_graded(tmp_path: Path, build: Callable[..., Path]) -> None:
    tokenizer, _ = special(tmp_path, build)
    assert tokenizer.answer_text(tokenizer.encode("It is 5.<sep>user It is not.<sep>It is 7.")) == "It is 5."


@pytest.mark.parametrize("build", [llama2, llama3])
def test_an_added_token_that_is_not_special_is_text(tmp_path: Path, build: Callable[..., Path]) -> None:
    tokenizer, _ = special(tmp_path, build)
    assert tokenizer.answer_text(tokenizer.encode("a<think>b")) == "a<think>b"


# Begin and end


@pytest.mark.parametrize("build", [llama2, llama3])
def test_without_a_template_contents_are_joined_after_the_begin_token(
    tmp_path: Path, build: Callable[..., Path]
) -> None:
    (build(tmp_path) / "tokenizer_config.json").unlink(missing_ok=True)
    write(tmp_path / "special_tokens_map.json", {"bos_token": "<s>" if build is llama2 else "<|begin_of_text|>"})
    write(tmp_path / "config.json", {"eos_token_id": 2})
    tokenizer = load_tokenizer(tmp_path)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 7 times 8?"}]
    assert tokenizer.chat_template is None
    assert tokenizer.chat(chat) == [tokenizer.bos_id, *tokenizer.encode("Be brief.\n\nWhat is 7 times 8?")]


@pytest.mark.parametrize("build", [llama2, llama3])
def test_the_config_may_switch_the_begin_token_off(tmp_path: Path, build: Callable[..., Path]) -> None:
    build(tmp_path)
    write(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    write(tmp_path / "generation_config.json", {"eos_token_id": 1})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a")


def test_a_post_processor_that_adds_nothing_adds_no_begin_token(tmp_path: Path) -> None:
    folder = llama3(tmp_path, chat_template=None)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = processors.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).chat([{"role": "user", "content": "<|eot_id|>"}]) == [1]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (1,)),
        (2, None, (1, 2)),
        (0, None, (0, 1)),
        ([4, 2], None, (1, 2, 4)),
        ([304, 1, 304], [3], (1, 3, 304)),
        ([4], 3, (1, 3, 4)),
    ],
)
def test_every_end_token_counts_once(tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    folder = llama3(tmp_path)
    write(folder / "generation_config.json", {"eos_token_id": generation})
    write(folder / "config.json", {"eos_token_id": config})
    assert load_tokenizer(folder).end_ids == expected


def test_the_end_token_may_be_spelled_as_an_object_or_in_the_special_tokens_map(tmp_path: Path) -> None:
    folder = llama3(tmp_path, eos_token={"content": "<|end_of_text|>", "special": True})
    assert load_tokenizer(folder).end_ids == (2,)
    write(folder / "tokenizer_config.json", {})
    write(folder / "special_tokens_map.json", {"eos_token": {"content": "<|eot_id|>"}})
    assert load_tokenizer(folder).end_ids == (1,)


@pytest.mark.parametrize("ends", [None, [], "</s>", [1, None, "2"], True, -1, [[1]], {"a": 1}, 1.0])
def test_no_end_token_is_an_error(tmp_path: Path, ends: Any) -> None:
    folder = llama3(tmp_path, eos_token=None)
    write(folder / "generation_config.json", {"eos_token_id": ends})
    with pytest.raises(UserError, match=r"eos_token_id in generation_config\.json"):
        load_tokenizer(folder)


# Templates


def test_the_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    assert rendered(tmp_path, "own {{ messages[0].content }}") == "own hi"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n", "hi\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'ü': '<'} | tojson(indent=1) }}", '{\n "ü": "<"\n}'),
        ("{{ tools is none }}{{ add_generation_prompt }}{{ eos_token }}{{ pad_token is defined }}", "TrueTrueFalse"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ strftime_now('%Y') }}", datetime.now().strftime("%Y")),
    ],
)
def test_templates_find_what_they_are_written_for(tmp_path: Path, template: str, expected: str) -> None:
    assert rendered(tmp_path, template) == expected
    chat = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(tmp_path).chat(chat) == theirs(tmp_path, chat)


def test_of_several_templates_the_default_counts(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    tokenizer = load_tokenizer(llama3(tmp_path, chat_template=templates))
    assert tokenizer.decode(tokenizer.chat(CHATS[0])) == tokenizer.chat_template == "plain"
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .*'default'"):
        load_tokenizer(llama3(tmp_path, chat_template=templates[:1]))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    ],
)
def test_a_template_that_fails_is_a_user_error(tmp_path: Path, template: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        rendered(tmp_path, template)
    assert str(tmp_path) in str(caught.value)


def test_a_broken_template_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: broken chat template"):
        load_tokenizer(llama3(tmp_path, chat_template="{% if %}"))
    with pytest.raises(UserError, match=r"chat_template\.jinja: broken chat template"):
        rendered(tmp_path, "{{ unclosed")
    with pytest.raises(UserError, match=r"chat_template\.jinja: .* unknown tag 'include_all'"):
        rendered(tmp_path, "{% include_all %}")


@pytest.mark.parametrize("content", ["", " \n", b"\xff\xfe{{ messages }}"])
def test_a_template_that_is_empty_or_no_utf8_is_named(tmp_path: Path, content: str | bytes) -> None:
    path = llama3(tmp_path) / "chat_template.jinja"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"chat_template\.jinja: (the chat template is empty|is not UTF-8 at byte 1)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("source", [3, True, {"default": "x"}, [], ["x"], [{"name": "default"}], [{"name": 3}]])
def test_a_template_of_another_type_is_named(tmp_path: Path, source: Any) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: broken chat template"):
        load_tokenizer(llama3(tmp_path, chat_template=source))


def test_a_template_that_writes_nothing_is_an_error_before_any_sampling(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a chat of roles \['user'\] comes to no token"):
        rendered(tmp_path, "{% if messages[0].role == 'tool' %}x{% endif %}")


def test_marks_of_the_assistants_words_leave_its_text(tmp_path: Path) -> None:
    template = (
        "{% set x = 'out' %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{% set x = 'in' %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}{{ x }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(llama3(tmp_path))
    assert tokenizer.decode(tokenizer.chat(CHATS[1])) == "It is 56.It is 56.out"
    assert tokenizer.chat(CHATS[1]) == theirs(tmp_path, CHATS[1])


# Variables and the day

LLAMA32_DAY = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today: {{ date_string }}{% if enable_thinking is defined and not enable_thinking %} at once{% endif %}"
)


def test_the_day_is_the_one_that_is_given_at_any_hour(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y, %H:%M') }}")
    tokenizer = load_tokenizer(llama3(tmp_path), today=date(2024, 7, 26))
    assert tokenizer.decode(tokenizer.chat(CHATS[0])) == "26 Jul 2024, 00:00"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "Today: 26 Jul 2024"),
        ({"date_string": "never"}, "Today: never"),
        ({"enable_thinking": False}, "Today: 26 Jul 2024 at once"),
        ({"enable_thinking": True, "date_string": 3}, "Today: 3"),
    ],
)
def test_variables_reach_the_template_as_with_transformers(
    tmp_path: Path, variables: dict[str, Any], expected: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(LLAMA32_DAY)
    tokenizer = load_tokenizer(llama3(tmp_path), variables, date(2024, 7, 26))
    assert tokenizer.decode(tokenizer.chat(CHATS[0])) == expected
    if "date_string" in variables:
        oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.chat(CHATS[0]) == oracle.apply_chat_template(CHATS[0], return_dict=False, **variables)


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "bos_token"])
def test_a_variable_that_the_template_does_not_leave_open_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(LLAMA32_DAY + "{{ bos_token }}{{ messages }}")
    with pytest.raises(UserError, match=f"sets '{name}', but .* reads date_string, enable_thinking$"):
        load_tokenizer(llama3(tmp_path), {name: "x"})


def test_variables_without_a_template_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.template sets 'x', but .* has no chat template"):
        load_tokenizer(llama3(tmp_path, chat_template=None), {"x": 1})


# Positions


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": "2048"}, None),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "linear", "factor": 4}}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_the_positions_are_those_that_rope_is_stretched_to(
    tmp_path: Path, config: dict[str, Any], positions: int | None
) -> None:
    write(llama3(tmp_path) / "config.json", config)
    assert load_tokenizer(tmp_path).model_max_length == positions


# Files


@pytest.mark.parametrize("build", [llama2, llama3])
def test_saved_files_are_the_same_tokenizer(tmp_path: Path, build: Callable[..., Path]) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    source.mkdir()
    build(source)
    (source / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    write(source / "generation_config.json", {"eos_token_id": [2, 3]})
    tokenizer = load_tokenizer(source)
    tokenizer.save(target)
    tokenizer.save(source)  # onto itself
    again = load_tokenizer(target)
    assert again.chat(CHATS[0]) == tokenizer.chat(CHATS[0])
    assert again.end_ids == tokenizer.end_ids
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in source.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.model", "no protobuf", r"tokenizer\.model: not a sentencepiece model"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("special_tokens_map.json", "[]", r"special_tokens_map\.json: holds a list"),
        ("generation_config.json", "", r"generation_config\.json: not JSON"),
        ("config.json", "nul", r"/config\.json: not JSON"),
        ("added_tokens.json", "{", r"added_tokens\.json: not JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    (llama2 if name in ("tokenizer.model", "added_tokens.json") else llama3)(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=complaint) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_post_processor_that_the_library_panics_on_is_named(tmp_path: Path) -> None:
    path = llama3(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["post_processor"]["special_tokens"] = {}
    write(path, data)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_without_its_tokenizer_says_how_to_make_it(tmp_path: Path) -> None:
    write(tmp_path / "vocab.json", {"a": 0})
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UserError, match=r"holds vocab\.json but no tokenizer\.json; .*save_pretrained"):
        load_tokenizer(tmp_path)


def test_an_absent_folder_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent: no tokenizer; it must hold"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no tokenizer; it must hold tokenizer\.json or tokenizer\.model"):
        load_tokenizer(tmp_path)


# A real checkpoint


@pytest.mark.checkpoint
@pytest.mark.parametrize("chat", CHATS)
def test_chats_of_a_real_checkpoint_are_those_of_transformers(chat: list[dict[str, str]]) -> None:
    folder = Path(os.environ["DPH_CHECKPOINT"])
    tokenizer: Tokenizer = load_tokenizer(folder)
    ids = tokenizer.chat(chat)
    assert ids == theirs(folder, chat)
    expected = transformers.AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == expected
