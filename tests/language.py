"""Small texts in two made-up languages, and a network for tokens that needs no extra."""

import random
from pathlib import Path

import torch
from torch import Tensor, nn

from coterie.federation import Federation

WORDS = {
    "aa": ["la", "casa", "blanca", "mira", "el", "sol", "canta"],
    "bb": ["ein", "hund", "lief", "durch", "das", "alte", "haus"],
}
VOCABULARY = 7


def text(language: str, lines: int = 60, seed: int = 0) -> str:
    """Sentences of eight words at random, one a line."""
    draw = random.Random(f"{language} {seed}")
    return "".join(" ".join(draw.choices(WORDS[language], k=8)) + "\n" for _ in range(lines))


def write_texts(folder: Path, **lines: int) -> Path:
    """Files of kinds `docs`, `ntrex` and `sentences` for both languages, below `folder`/text."""
    (folder / "text").mkdir()
    for language in WORDS:
        for seed, kind in enumerate(("docs", "ntrex", "sentences")):
            (folder / "text" / f"{language}.{kind}.txt").write_text(text(language, lines.get(kind, 60), seed))
    return folder


def tokens(sequences: int, length: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any tokens and those that follow them."""
    drawn = torch.randint(0, VOCABULARY, (sequences, length + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def token_federation(*sizes: int) -> Federation:
    """Clients that hold so many sequences, all tested on the same four."""
    clients = [tokens(size, seed=client) for client, size in enumerate(sizes)]
    return Federation.from_arrays(clients, tokens(4, seed=99), vocabulary=VOCABULARY)


class Bigram(nn.Module):
    """Scores of the next token from the present one: [n, T] -> [n, vocabulary, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.table(x)
        return scores.mT
