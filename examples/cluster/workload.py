"""Prompts made of real text: the documentation that any CPython installation carries.

Tokens are bytes. Prompts of the four ordinary kinds are drawn with a seed, with log-normal lengths;
the edge cases (lengths around one block, an exact repeat) are always there.
"""

from __future__ import annotations

import importlib
import math
import pydoc_data.topics
import random
import re
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import attrs

MIN_MAX_TOKENS = 65
TINY_TOKENS = (1, 63, 64, 65)
SIGMA = 1.0  # of the logarithm of lengths
DOCUMENT_TOKENS = (3000, 4500, 9000)  # least, median of the untruncated law, most
LONGEST_DOCUMENT_TOKENS = (8100, 8400, 9000)
SHORT_TOKENS = (30, 110, 400)
MESSAGE_TOKENS = (80, 450, 2400)
ANSWER_TOKENS = (120, 260, 700)
MODULES = ("argparse", "csv", "decimal", "difflib", "heapq", "random", "statistics", "timeit")

PROSE = re.compile(r"[A-Z][^=|:]*[.]")

SYSTEM_PROMPT = """\
You are the assistant of a help desk for people who learn Python. You answer questions about the \
language and its standard library, and you explain what the reference manual says in plain words.

Rules of the house:
- Answer the question that was asked, first in one sentence and then with the detail it needs.
- When a passage is quoted, rely on the passage and say which part of it you used.
- Show a short example when it makes the answer clearer; never more than ten lines of code.
- If the manual leaves something undefined, say so. Do not guess, and do not invent names.
- Be friendly and brief. The reader is at work and wants to go on.
"""


@attrs.frozen(kw_only=True)
class Prompt:
    """One request of the run.

    Attributes:
        kind: "document", "chat", "short", "repeat" or "tiny".
        text: the prompt; one token is one byte.
        after: the request whose answer must be there before this one is sent.
        arrival_s: seconds after the start of the run.
    """

    request_id: str
    kind: str
    text: bytes = attrs.field(repr=lambda text: f"<{len(text)} bytes>")
    after: str | None = None
    arrival_s: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.text)


@attrs.frozen(kw_only=True)
class WorkloadSize:
    """How many prompts of each kind; ``conversations`` holds the number of turns of each."""

    num_documents: int
    conversations: tuple[int, ...]
    num_shorts: int


SIZES = {
    "quick": WorkloadSize(num_documents=4, conversations=(2, 2), num_shorts=1),
    "full": WorkloadSize(num_documents=7, conversations=(3, 3, 3), num_shorts=7),
}


@attrs.frozen(kw_only=True)
class Chapter:
    """A piece of the manual; ``title`` is its first line."""

    title: str
    text: str

    def prose(self, num_chars: int) -> str:
        """Whole sentences up to ``num_chars``, at least one where the chapter has any."""
        paragraphs = (" ".join(p.split()) for p in self.text.split("\n\n")[1:])
        sentences = [
            sentence
            for paragraph in paragraphs
            if PROSE.fullmatch(paragraph)
            for sentence in re.split(r"(?<=[.]) (?=[A-Z])", paragraph)
        ]
        said = "".join(sentences[:1])
        for sentence in sentences[1:]:
            if len(said) + 1 + len(sentence) > num_chars:
                break
            said += f" {sentence}"
        return said


class Library:
    """The chapters, each handed out once per round in an order drawn with a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._chapters = chapters()
        self._shelf: list[Chapter] = []

    def chapter(self) -> Chapter:
        if not self._shelf:
            self._shelf = self._rng.sample(self._chapters, len(self._chapters))
        return self._shelf.pop()

    def volume(self, num_chars: int) -> Chapter:
        """A chapter and as many others after it as it takes to fill ``num_chars``."""
        volume = self.chapter()
        while len(volume.text) < num_chars:
            text = f"{volume.text}\n\n\n{self.chapter().text}"
            volume = attrs.evolve(volume, text=text)
        return volume


def chapters() -> list[Chapter]:
    """The help topics and some module docstrings in ASCII, in the same order in every process."""
    raw = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    raw += [importlib.import_module(name).__doc__ or "" for name in MODULES]
    texts = dict.fromkeys(text for text in map(_plain, raw) if len(text) >= 200)
    return [Chapter(title=text.partition("\n")[0][:60].strip(" ."), text=text) for text in texts]


def make_workload(
    seed: int, *, size: str = "quick", max_tokens: int = 9000, arrivals_per_s: float = 1.0
) -> list[Prompt]:
    """The prompts of a run in order of arrival; the same for a seed and a Python version.

    Args:
        size: "quick" (14 prompts) or "full" (28).
        max_tokens: prompts are cut to this length; at least one has 8,000 tokens if it allows.
        arrivals_per_s: mean rate of the Poisson process of arrivals.

    Raises:
        ValueError: unknown size, ``max_tokens`` below 65, or a rate that is not above 0.
    """
    if size not in SIZES:
        raise ValueError(f"size is {size!r}; known are {', '.join(SIZES)}")
    if max_tokens < MIN_MAX_TOKENS:
        raise ValueError(
            f"max_tokens is {max_tokens}; the shortest limit is {MIN_MAX_TOKENS}, so that prompts "
            "around one block of 64 fit"
        )
    if not 0 < arrivals_per_s < math.inf:
        raise ValueError(f"arrivals_per_s is {arrivals_per_s!r}; it must be a number above 0")
    rng = random.Random(f"prfaas workload {seed}")
    library = Library(rng)
    documents = list(_documents(rng, library, SIZES[size].num_documents, max_tokens))
    repeated = documents[-1]
    chains = [[document] for document in documents[:-1]]
    chains.append([repeated, _repeat(repeated)])
    for number, num_turns in enumerate(SIZES[size].conversations, start=1):
        chains.append(list(_turns(rng, library, number, num_turns, max_tokens)))
    chains += [[p] for p in _shorts(rng, library, SIZES[size].num_shorts, max_tokens)]
    chains += [[p] for p in _tinies(library)]
    return _arrive(rng, chains, arrivals_per_s)


def _documents(
    rng: random.Random, library: Library, count: int, max_tokens: int
) -> Iterator[Prompt]:
    for number in range(1, count + 1):
        law = LONGEST_DOCUMENT_TOKENS if number == 1 else DOCUMENT_TOKENS
        length = min(_length(rng, law), max_tokens)
        volume = library.volume(length)
        head = f"{volume.title}\n\nSummary of the following chapter of the reference manual.\n\n"
        tail = "\n\nIn short, this chapter says that "
        body = volume.text[: max(0, length - len(head) - len(tail))].rpartition(" ")[0]
        yield _prompt(f"document-{number}", "document", head + body + tail, max_tokens)


def _turns(
    rng: random.Random, library: Library, conversation: int, num_turns: int, max_tokens: int
) -> Iterator[Prompt]:
    """Each turn's prompt is the one before, the answer to it, and a new message."""
    text, before = SYSTEM_PROMPT, None
    for turn in range(1, num_turns + 1):
        length = _length(rng, MESSAGE_TOKENS)
        volume = library.volume(length)
        quoted = volume.text[:length].rpartition(" ")[0]
        text += f"\nUser: In the manual I read:\n\n{quoted} [...]\n\n"
        text += f"What does it say about {volume.title}?\n\nAssistant:"
        request_id = f"chat-{conversation}.{turn}"
        yield _prompt(request_id, "chat", text, max_tokens, after=before)
        answer = volume.prose(_length(rng, ANSWER_TOKENS))
        text += f" {answer or 'It defines the syntax, and leaves the rest to the reader.'}\n"
        before = request_id


def _shorts(rng: random.Random, library: Library, count: int, max_tokens: int) -> Iterator[Prompt]:
    for number in range(1, count + 1):
        chapter = library.chapter()
        question = f"Question: what is meant by {chapter.title}?\nAnswer:"
        room = _length(rng, SHORT_TOKENS) - len(question) - 1
        context = f"{chapter.text[:room].rpartition(' ')[0]}\n" if room > 40 else ""
        yield _prompt(f"short-{number}", "short", context + question, max_tokens)


def _tinies(library: Library) -> Iterator[Prompt]:
    for num_tokens in TINY_TOKENS:
        text = library.chapter().text[:num_tokens]
        yield _prompt(f"tiny-{num_tokens}", "tiny", text, num_tokens)


def _prompt(
    request_id: str, kind: str, text: str, max_tokens: int, after: str | None = None
) -> Prompt:
    return Prompt(request_id=request_id, kind=kind, text=text.encode()[:max_tokens], after=after)


def _repeat(prompt: Prompt) -> Prompt:
    return Prompt(
        request_id="repeat-1",
        kind="repeat",
        text=prompt.text,
        after=prompt.request_id,
    )


def _arrive(
    rng: random.Random, chains: Sequence[Sequence[Prompt]], arrivals_per_s: float
) -> list[Prompt]:
    """Chains mixed at random, each in its own order, with exponential gaps."""
    turns = [chain for chain, prompts in enumerate(chains) for _ in prompts]
    rng.shuffle(turns)
    waiting = [iter(prompts) for prompts in chains]
    arrived, now = [], 0.0
    for chain in turns:
        arrived.append(attrs.evolve(next(waiting[chain]), arrival_s=now))
        now += rng.expovariate(arrivals_per_s)
    return arrived


def _length(rng: random.Random, law: tuple[int, int, int]) -> int:
    """A log-normal length, truncated to the range of ``law`` (least, median, most)."""
    least, median, most = law
    normal = NormalDist(math.log(median), SIGMA)
    low, high = normal.cdf(math.log(least)), normal.cdf(math.log(most))
    return min(max(least, round(math.exp(normal.inv_cdf(rng.uniform(low, high))))), most)


def _plain(text: str) -> str:
    """ASCII text without deep indentation, wide gaps and runs of blank lines."""
    ascii_only = text.expandtabs().encode("ascii", "ignore").decode()
    trimmed = re.sub(r" +\n", "\n", re.sub(r"[*=~-]{4,}", "", ascii_only))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" {4,}", "  ", trimmed)).strip()
