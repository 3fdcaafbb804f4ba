"""Checks a built site, in some seconds: `make site`.

It proves that each link inside leads to a page and to the place named on it, and that each public name has a page with
the first line of its docstring.

    python tests/support/site_check.py out/site
"""

import html.parser
import inspect
import re
import sys
import urllib.parse
from pathlib import Path

from api_index import sections

import hpcdist

#: What the page of a name without a docstring lacks.
_NO_DOCSTRING = "a docstring"
#: Where the index of names is, and the pages that Sphinx makes from it.
NAMES = Path("docs/reference/api.html")
PAGES_OF_NAMES = Path("docs/reference/api")


class Page(html.parser.HTMLParser):
    """What a page links to, and the places on it.

    Attributes:
        links: values of href and src, in their order.
        places: values of id.
        words: its text in lower case, without punctuation.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self._texts: list[str] = []
        self.feed(text)
        self.words = words_of(" ".join(self._texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)

    def handle_data(self, data: str) -> None:
        self._texts.append(data)


def words_of(text: str) -> str:
    """Return the words of a text, joined by single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def broken_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return each link that leads to no file of the site, or to no place on its page."""
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            place = urllib.parse.unquote(parts.fragment)
            has_place = target not in pages or not place or place in pages[target].places
            if not target.exists() or not has_place:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def names_without_pages(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return each public name that has no page with the first line of its docstring."""
    missing = []
    for names in sections().values():
        for name in names:
            page = pages.get(site / PAGES_OF_NAMES / f"hpcdist.{name}.html")
            if page is None or first_words_of(name) not in page.words:
                missing.append(name)
    return missing


def first_words_of(name: str) -> str:
    """Return the words of the first line of a name's docstring.

    A constant has none. The page of a second name for a class says which class that is.
    """
    item = hpcdist
    for part in name.split("."):
        item = getattr(item, part)
    if not (inspect.isclass(item) or inspect.isroutine(item) or inspect.ismodule(item)):
        return ""
    if inspect.isclass(item) and item.__name__ != name.rpartition(".")[2]:
        return words_of(item.__name__)
    first_line, _, _ = (inspect.getdoc(item) or _NO_DOCSTRING).partition("\n")
    return words_of(first_line)


def main(folder: str) -> int:
    """Print what is wrong with a site; return 1 if anything is."""
    site = Path(folder).resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = [f"link to nothing in {link}" for link in broken_links(site, pages)]
    missing = [
        f"no page, or one without its docstring, for hpcdist.{name}" for name in names_without_pages(site, pages)
    ]
    print("\n".join([*broken, *missing]) or f"{len(pages)} pages, every link and name found")
    return int(bool(broken or missing or site / NAMES not in pages))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
