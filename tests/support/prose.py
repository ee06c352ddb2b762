"""The sentences of a page or a module, and what is wrong with them.

python -m tests.support.prose FILE... prints the words of pages, their long sentences, and passives per 100 sentences.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

LONGEST = 25  # words of a sentence
CODE = "`x`"  # stands for code in a sentence, as one word

# Each was given up for a plainer one. Where a phrase has a plain meaning as well, its pattern is the odd use alone.
PHRASES = (
    r"(is|are|was|be|been|when|not|once) told", r"tells", r"says? so", r"(goes|go|going|went) on(?! \d)",
    r"(has|have|had) ended", r"(is|are) over(?=[.,;:)]|$)", r"(start|starts|started|starting|comes?|came) again",
    r"(is|are|was|were) (let go|left out)", r"for nothing", r"in vain", r"turned away", r"asks? again",
    r"dials?|dialled|dialling", r"(deals?|dealt|dealing|hands?|handed) out", r"not given", r"so many", r"so often",
    r"(after|for) so long", r"so much silence", r"no such bound", r"one for each", r"the other way round",
    r"by (itself|themselves)", r"of (its|their) own", r"(is|are) there(?=[.,;:)])", r"(has|have) come", r"lies",
    r"(stand|stands|stood) in(?! line)", r"strays?", r"of ours", r"makes? no sense", r"allocation's end", r"by hand",
    r"nobody knows", r"(cannot|can't) be known", r"we", r"us", r"ours?", r"simply", r"of course", r"please",
)  # fmt: skip
FOREIGN = ("Please see the FAQ",)  # texts of other programs, which the package recognizes
BRITISH = (
    r"colour\w*", r"honour\w*", r"behaviour", r"neighbour\w*", r"recognis\w+", r"serialis\w+",
    r"initialis\w+", r"organis\w+", r"cent(re|red)", r"labelled", r"grey", r"favour\w*", r"(?-i:cancelled)",
    r"cancelling", r"signalling", r"travell\w+", r"modell\w+",
)  # fmt: skip
_PHRASE = re.compile(rf"(?<![\w'-])(?:{'|'.join(PHRASES + BRITISH)})(?![\w-])", re.IGNORECASE)
_IRREGULAR = (
    "begun|born|bound|broken|built|chosen|cut|done|drawn|driven|found|forgotten|given|held|hidden|hit|kept|known|left|"
    "lent|lost|made|meant|met|put|read|run|seen|sent|set|shown|shut|split|stopped|taken|told|thrown|written"
)
_PASSIVE = re.compile(rf"\b(?:is|are|was|were|be|been|being)\s+(?:\w+ly\s+|not\s+|never\s+)?(?:\w+ed|{_IRREGULAR})\b")
_FENCE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2$", re.MULTILINE | re.DOTALL)
_END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!][\"')*]))\s+(?=[\"'(*`]*(?:[A-Z`\d]|infini-))")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|no)\.", re.IGNORECASE)


def paragraphs(markdown: str) -> list[str]:
    """Return the running text of a page: its headings, paragraphs, list items, and cells, without code."""
    text = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^:::.*\n(?: .*\n|\n(?= ))*", "\n", _FENCE.sub("\n", text), flags=re.MULTILINE)
    text = re.sub(r"``.+?``|`[^`]+`", CODE, text, flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)(\{[^}]*\})?|<[^>]+>|:(?:material|octicons)[\w-]+:", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    found: list[str] = []
    is_open = False  # the next line belongs to the last paragraph
    for line in text.splitlines():
        words = line.strip()
        if re.match(r"\|", words):
            found += [cell.strip() for cell in words.strip("|").split("|") if cell.strip(" :-")]
        elif starts := re.match(r"#+ |[-*] |\d+\. |(?:===[!+]?|!!!|\?\?\?\+?) |> ", words):
            found.append(words[starts.end() :])
        elif is_open and words:
            found[-1] += f" {words}"
        elif words:
            found.append(words)
        is_open = bool(words) and not re.match(r"#+ |\||===|!!!|\?\?\?", words)
    return found


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page."""
    texts = [_ABBREVIATION.sub(r"\1", text) for text in paragraphs(markdown)]
    return [sentence for text in texts for sentence in _END.split(text) if re.search(r"\w", sentence)]


def words(text: str) -> int:
    """Return how many words a text has."""
    return len([word for word in text.split() if re.search(r"\w", word)])


def long_sentences(markdown: str) -> list[str]:
    """Return the sentences that are too long."""
    return [sentence for sentence in sentences(markdown) if words(sentence) > LONGEST]


def passives(markdown: str) -> float:
    """Return the passives per 100 sentences."""
    found = sentences(markdown)
    return 100 * sum(len(_PASSIVE.findall(sentence)) for sentence in found) / max(1, len(found))


def phrases(text: str) -> list[str]:
    """Return the phrases of a text that the project has given up."""
    return [match[0] for match in _PHRASE.finditer(" ".join(text.split()))]


def texts_of_module(source: str) -> list[str]:
    """Return a module's docstrings, its other strings of two words or more (messages, help), and its comments."""
    nodes = ast.walk(ast.parse(source))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [string for string in strings if re.search(r"\w\w+ \w\w", string) and string not in FOREIGN]
    return [re.sub(r"``?[^`]+``?", CODE, text) for text in texts + comments(source)]


def comments(source: str) -> list[str]:
    """Return a module's comments; the lines of one that has several are joined."""
    found: list[str] = []
    last = 0  # line of the last comment, if it has a line to itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words, (line, column) = token.string.lstrip("# "), token.start
        if last and line == last + 1:
            found[-1] += f" {words}"
        else:
            found.append(words)
        last = 0 if token.line[:column].strip() else line
    return found


def main(paths: list[str]) -> None:
    """Print the counts of pages."""
    print(f"{'page':40} words  over 25  passives/100")
    for path in paths:
        text = Path(path).read_text()
        count = sum(words(paragraph) for paragraph in paragraphs(text))
        print(f"{path:40} {count:5}  {len(long_sentences(text)):7}  {passives(text):8.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
