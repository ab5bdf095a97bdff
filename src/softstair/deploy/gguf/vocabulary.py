"""The vocabulary of a file: of bytes, of characters, or of a tokenizer of Hugging Face."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softstair import _check
from softstair._errors import import_extra

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits a text before byte pairs are merged."""


@dataclass(frozen=True)
class Vocabulary:
    """The fields ``tokenizer.ggml.*`` of a file.

    Args:
        model: ``"rwkv"`` (the longest token that fits), ``"llama"`` (SentencePiece) or ``"gpt2"``.
        tokens: The text of each token, in the notation of the model.
        types: The type of each token, as llama.cpp numbers them; all are texts if it is empty.
        fields: Other fields, such as ``scores``, ``merges`` and ``bos_token_id``.
    """

    model: str
    tokens: Sequence[str]
    types: Sequence[int] = ()
    fields: Mapping[str, Any] | None = None


def vocabulary_of(tokenizer: "str | Path | Vocabulary", size: int) -> Vocabulary:
    """Return the vocabulary that `tokenizer` means, for so many tokens; see `write`."""
    if isinstance(tokenizer, Vocabulary):
        words = tokenizer
    elif tokenizer == "bytes":
        words = _of_texts([bytes([n]) for n in range(min(size, 256))])
    elif (path := Path(tokenizer)).suffix == ".txt" and path.is_file():
        words = characters(path.read_bytes().decode())
    elif (path / "tokenizer.json").is_file():
        words = _of_folder(path)
    else:
        allowed = "'bytes', a .txt file of all characters in order, or a folder of Hugging Face"
        raise _check.wrong("tokenizer", str(tokenizer), f"{allowed} with a tokenizer.json")
    missing = size - len(words.tokens)
    if missing < 0:
        problem = f"must have at most {size} tokens, as the network, but has {len(words.tokens)}"
        raise _check.invalid("tokenizer", problem)
    types = [*(words.types or [NORMAL] * len(words.tokens)), *[UNUSED] * missing]
    tokens = [*words.tokens, *(f"<unused {number}>" for number in range(missing))]
    fields = dict(words.fields or {})
    if "scores" in fields:
        fields["scores"] = [*fields["scores"], *[0.0] * missing]
    return replace(words, tokens=tokens, types=types, fields=fields)


def characters(text: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of single characters, each of which is the token of its place.

    >>> characters("ab ").tokens
    ['a', 'b', '\\\\x20']
    """
    return _of_texts([character.encode() for character in text])


def _of_texts(texts: Sequence[bytes]) -> Vocabulary:
    """Return tokens that stand for bytes, without special tokens, spaces or merges."""
    shown = lambda n: chr(n) if chr(n).isalnum() and n < 128 else f"\\x{n:02x}"
    return Vocabulary("rwkv", ["".join(map(shown, text)) for text in texts])


def _of_folder(folder: Path) -> Vocabulary:
    """Return the vocabulary of a fast tokenizer of Hugging Face."""
    transformers: Any = import_extra("transformers", "transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = known["model"], {token["id"]: token for token in known["added_tokens"]}
    words = {number: word for word, number in model.get("vocab", {}).items()}
    words |= {number: token["content"] for number, token in added.items()}
    if model["type"] != "BPE" or sorted(words) != [*range(len(words))]:
        raise _check.invalid("tokenizer", f"must be BPE without gaps, but is {model['type']}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    numbers = {name: getattr(tokenizer, f"{own}_token_id") for own, name in special.items()}
    fields: dict[str, Any] = {f"{k}_token_id": n for k, n in numbers.items() if n is not None}
    first = tokenizer.encode("a")[:1]
    fields |= {"add_bos_token": first == [tokenizer.bos_token_id], "add_eos_token": False}
    tokens = [words[number] for number in range(len(words))]
    types = [_type(word, added.get(number), model) for number, word in enumerate(tokens)]
    if model.get("byte_fallback"):
        ranks = {pair.replace(" ", ""): -float(n) for n, pair in reversed([*enumerate(merges, 1)])}
        fields["scores"] = [ranks.get(token, 0.0) for token in tokens]
        fields["add_space_prefix"] = tokenizer.tokenize("a")[0].startswith("▁")
        return Vocabulary("llama", tokens, types, fields)
    fields |= {"merges": merges, "pre": _splits(known["pre_tokenizer"] or {})}
    return Vocabulary("gpt2", tokens, types, fields)


def _type(word: str, added: Mapping[str, Any] | None, model: Mapping[str, Any]) -> int:
    if word == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER
    is_byte = len(word) == 6 and word.startswith("<0x") and model.get("byte_fallback")
    return BYTE if is_byte else NORMAL


def _splits(pre_tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how a text is split before byte pairs are merged."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    patterns = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    levels = [part for part in parts if part.get("type") == "ByteLevel"]
    if len(levels) == 1 and len(parts) == len(patterns) + 1 and not levels[0]["add_prefix_space"]:
        for name, expected in (("gpt-2", []), ("llama-bpe", [LLAMA3])):
            if patterns == expected and levels[0]["use_regex"] == (not expected):
                return name
    allowed = "must split texts as GPT-2 or Llama 3 does, or be of SentencePiece with byte_fallback"
    raise _check.invalid("tokenizer", f"{allowed}, but it splits them otherwise")
