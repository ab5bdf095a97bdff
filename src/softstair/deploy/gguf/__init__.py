"""GGUF: a trained Llama-shaped network as a file for llama.cpp, and whether a file is one."""

from softstair.deploy.gguf.network import NAMES
from softstair.deploy.gguf.runtime import tokens_a_second, tokens_of
from softstair.deploy.gguf.verifying import Distance, Verification, verify
from softstair.deploy.gguf.vocabulary import Vocabulary, characters
from softstair.deploy.gguf.writing import Ternary, write

__all__ = [
    "NAMES",
    "Distance",
    "Ternary",
    "Verification",
    "Vocabulary",
    "characters",
    "tokens_a_second",
    "tokens_of",
    "verify",
    "write",
]
