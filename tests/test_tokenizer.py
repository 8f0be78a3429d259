"""The tokenizer against transformers on small ones built here: chats, begin and end tokens, both kinds of file."""

import io
import json
import os
from collections.abc import Callable
from datetime import datetime
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


@pytest.mark.parametrize("ends", [None, [], "</s>", [1, None, "2"]])
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
    with pytest.raises(UserError, match=r"chat_template\.jinja: .* unknown tag 'generation'"):
        rendered(tmp_path, "{% generation %}hi{% endgeneration %}")


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
