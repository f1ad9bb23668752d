"""Plain English in pages, docstrings and messages: short sentences and the words of the field.

`python tests/pages/test_words.py [PATH...]` lists what is found, by default in everything that is tested.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_WORDS_OF_A_SENTENCE = 40
MOST_WORDS_OF_A_CHANGE = 25
MOST_WORDS_OF_DOCS = 45_000
PHRASES = {
    r"go(es|ing)? on|went on": "resume, continue",
    r"told|tells?|telling": "log, report, warn, raise, print",
    r"behind the (training|run|device|step|loop|job)": "asynchronously, in the background",
    r"(?<!there )(is|are|was|were) no (?!longer|more|less|other|way|need|such|one\b)[a-z]\w*": "is not a",
    r"nobody|somebody|whoever|whatever": "no process, a user, any",
    r"let go|given up|gives? up": "deleted, released, abandoned",
    r"belongs? into": "belongs in",
    r"is of the(?! (form|type|same|kind))|of equal ones": "has, in a tie",
    r"anew": "again",
    r"by the log's word|at one place|tak(e|es|en) along": "as the log states, together, copied",
    r"roll call|warden|headway": "rendezvous, host monitor, progress",
    r"(far|near) (store|log|place|disk|director(y|ies))": "remote, local",
    r"(end|exit|leave)(s|ed)? with [0-9]+(?! \w+ (digits|signs|letters))": "exit code N",
    r"prov(e|es|ed|ing)(?! (that|it)\b)": "verify",
    r"in the way": "exists; remove it",
    r"this very": "this",
    r"mend(s|ed|ing)?": "fix, repair",
    r"hear(s|d)? of": "receive, is notified of",
    r"what is meant": "the meaning, the target",
    r"(?<!it )(?<!when )comes? to(?! (the|a|an) end)": "reaches, equals",
}
"""What is a translation, and what to write in its place."""
BANNED = [(re.compile(rf"\b({phrase})\b", re.IGNORECASE), better) for phrase, better in PHRASES.items()]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs",
    "examples",
    "benchmarks",
    "scripts",
    "tests/bad_input/README.md",
    "tests/golden/README.md",
)
PACKAGES = (
    "jobs",
    "metadata",
    "checkpoint",
    "models",
    "runners",
    "tools",
    "integrations",
    "src",
    "tests/chaos",
)
VERBS = (
    "add|ask|begin|build|bring|call|change|check|choose|close|copy|create|declare|delete|drop|end|exclude|export|fix"
    "|free|give|import|install|keep|launch|leave|let|list|load|log|look|lower|make|merge|mount|move|name|omit|open"
    "|pass|point|put|raise|read|register|remove|rename|repeat|replace|restore|resume|return|run|save|see|send|set"
    "|start|stop|take|train|try|turn|update|use|wait|wrap|write"
)
TWO_REMEDIES = re.compile(rf"[:;] ({VERBS})\b[^.\n]*?(, or|; or|;| or) ({VERBS})\b")
INTENTIONS = ("raise --max-epochs to continue it, or train again with --force",)
"""Two commands that a message may offer, because only the user knows the intention."""
CODE = ("{%", "</", "esac\n", "SELECT ", "CREATE ", "INSERT ", "UPDATE ")
"""What only strings have that are programs or markup, not messages."""
SENTENCE_ENDS = re.compile(
    r"(?<=[.!?:;])\s+(?=[A-Z`*\[(\"'])"  # a capital letter, or marks before one, begin a sentence
    r"|(?<=[.!?;:])\n"
    r"|\n\s*\n"
    r"|\n(?=\s*(?:[-*#>]|\d+\.)\s)"  # items of lists, headings
    r"|\n(?=\s*\*{0,2}\w+(?: \([^)\n]*\))?: )"  # the entries below Args and Raises
    r"|\n(?=[^\n]*\S {2,}\S)"  # columns
    r"|\|"  # cells of tables
)
CEILINGS: dict[str, int] = {}
"""How many findings a folder may have: they only shrink, and a folder without an entry has none."""


@dataclass(frozen=True)
class Text:
    """A page, docstring or message, and where it begins."""

    path: Path
    line: int
    text: str
    is_marked_up: bool

    def findings(self) -> Iterator[str]:
        """Return file, line and complaint of each banned phrase and of each long sentence."""
        where = self.path.relative_to(ROOT)
        prose = re.sub(r"`[^`\n]*`", "`_`", self.text) if self.is_marked_up else self.text
        for phrase, better in BANNED:
            for match in phrase.finditer(prose):
                line = self.line + prose[: match.start()].count("\n")
                around = " ".join(prose[max(0, match.start() - 40) : match.end() + 40].split())
                yield f"{where}:{line}: {match[0]!r}, better: {better}: {around}"
        for line, sentence in sentences(prose):
            if (words := len(sentence.split())) > MOST_WORDS_OF_A_SENTENCE:
                yield f"{where}:{self.line + line}: {words} words: {' '.join(sentence.split())[:90]}"


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Split prose into sentences, each with its first line; a link counts with its words alone."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?m)^(#+ .*)$", r"\1.", text)
    begin = 0
    for end in [*SENTENCE_ENDS.finditer(text), None]:
        part = text[begin : end.start() if end else None]
        if part.strip():
            yield text[: begin + len(part) - len(part.lstrip())].count("\n"), part
        begin = end.end() if end else begin


def page_text(path: Path) -> Text:
    """Return a page without its blocks of code and comments, which keep their lines."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", _only_lines, path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return Text(path, 1, re.sub(r"<!--.*?-->", _only_lines, text, flags=re.DOTALL), is_marked_up=True)


def _only_lines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def module_texts(path: Path) -> Iterator[Text]:
    """Return the docstrings of a module and of its constants, and its strings of three words or more."""
    tree = ast.parse(path.read_text(), str(path))
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inner = {id(part) for node in strings for part in ast.walk(node) if part is not node}
    for node in strings:
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            text = "".join(str(part) for part in parts)
        elif isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) in docstrings:
            yield Text(path, node.lineno, re.sub(r"(?m)^.*(>>>|\.\.\.).*$", "", text), is_marked_up=True)
        elif len(text.split()) >= 3 and not any(mark in text for mark in CODE):
            yield Text(path, node.lineno, text, is_marked_up=False)


def texts(name: str) -> Iterator[Text]:
    """Return all texts of a file, or of the pages and modules in a folder."""
    start = ROOT / name
    for path in [start] if start.is_file() else sorted(start.rglob("*")):
        if path.suffix == ".md":
            yield page_text(path)
        elif path.suffix == ".py":
            yield from module_texts(path)


@cache
def findings(name: str) -> list[str]:
    """List the findings in a file or folder."""
    return [finding for text in texts(name) for finding in text.findings()]


def words_of_docs() -> int:
    """Count the words of all pages in docs/ as `wc -w` does: code and bars of tables are included."""
    return sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))


def long_changes() -> list[str]:
    """List the entries of the changelog that are too long."""
    entries = re.split(r"\n(?=- |#|\n)", (ROOT / "CHANGELOG.md").read_text())
    return [each for each in entries if len(each.split()) > MOST_WORDS_OF_A_CHANGE]


def two_remedies(text: Text) -> Iterator[str]:
    """Return file, line and message if the message names two remedies: imperatives joined by `or` or `;`."""
    if (
        not text.is_marked_up
        and TWO_REMEDIES.search(text.text)
        and not any(one in text.text for one in INTENTIONS)
    ):
        yield f"{text.path.relative_to(ROOT)}:{text.line}: {' '.join(text.text.split())}"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_message_names_one_remedy(name: str) -> None:
    """A message names the likeliest remedy alone: a user tries the first one anyway."""
    assert not (found := [one for text in texts(name) for one in two_remedies(text)]), "\n".join(found)


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("X is in use: stop the other job", 0),
        ("X is in use: stop the other job, or choose another directory", 1),
        ("X is full; free some space or remove old runs", 1),
        ("X has no model: train first; set init_prefix to use another", 1),
        ("X: set all of a, b or c", 0),
    ],
)
def test_remedies_of_a_message(message: str, count: int) -> None:
    """The rule finds the kind, and no list of values."""
    assert len(list(two_remedies(Text(ROOT / "x.py", 1, message, is_marked_up=False)))) == count


@pytest.mark.parametrize("name", [*PAGES, *PACKAGES])
def test_the_english_is_plain(name: str) -> None:
    """No folder has more findings than its ceiling."""
    found = findings(name)
    assert len(found) <= CEILINGS.get(name, 0), "\n".join(found)


def test_ceilings_only_shrink() -> None:
    """A ceiling is not above what is found, so that fewer findings stay fewer."""
    found = {name: len(findings(name)) for name in (*PAGES, *PACKAGES)}
    lower = {name: count for name, count in found.items() if count > 0}
    assert all(found[name] >= ceiling > 0 for name, ceiling in CEILINGS.items()), f"CEILINGS = {lower}"


def test_docs_are_short() -> None:
    """All pages in docs/ together can be read in a day."""
    assert words_of_docs() <= MOST_WORDS_OF_DOCS


def test_changes_are_one_line_each() -> None:
    """An entry of the changelog says what a user notices, in one sentence."""
    assert not (long := long_changes()), "\n".join(long)


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        ("A run goes on.", 1),
        ("The loader\ntells which file it was, and\nthe run is given up.", 2),
        ("See `goes on` and ```tells```.", 0),
        ("There is no epoch 3.", 0),
        ("3 is no epoch.", 1),
        ("It exits with 5, or proves that\nit read 5 files.", 1),
        (" ".join(["word"] * 41) + ".", 1),
        (" ".join(["word"] * 40) + ". " + "Word" + " word" * 39, 0),
        ("- " + "\n- ".join([" ".join(["word"] * 30)] * 3), 0),
    ],
)
def test_findings_of_a_text(prose: str, count: int) -> None:
    """Phrases are found across the ends of lines, and not in code; sentences end where a reader stops."""
    assert len(list(Text(ROOT / "page.md", 1, prose, is_marked_up=True).findings())) == count


def test_findings_of_a_module(tmp_path: Path) -> None:
    """Docstrings, formatted messages and their concatenated parts are read; comments and markup are not."""
    module = tmp_path / "module.py"
    module.write_text(
        '"""Who goes on."""\nX = 1\n"""What is told."""\n# tells\n'
        "def f(x):\n    '''A step.\n\n    >>> tells\n    '''\n"
        "    raise ValueError(f'{x} was saved and '\n        f'proved {x} times')\n"
        "Y = '<p>tells</p> of it'\n"
    )
    found = [(text.line, text.text.split()[-1]) for text in module_texts(module) if "step" not in text.text]
    assert sorted(found) == [(1, "on."), (3, "told."), (10, "times")]


if __name__ == "__main__":
    listed = [finding for name in sys.argv[1:] or (*PAGES, *PACKAGES) for finding in findings(name)]
    print("\n".join(listed))
    print(dict(Counter(finding.partition("/")[0].partition(":")[0] for finding in listed)), words_of_docs())
