"""What `make site` finds on a site: links to nothing, places that are not on their page, names without a page."""

import pytest
import site_check
from site_check import Page, broken_links, names_without_pages


def pages_of(folder, texts):
    pages = {}
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        pages[path] = Page(text)
    return pages


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("guide/b.html", False),
        ("guide/b.html#a-place", False),
        ("#top", False),
        ("https://example.org/missing.html", False),
        ("mailto:somebody@example.org", False),
        ("guide/c.html", True),
        ("guide/b.html#another-place", True),
        ("#bottom", True),
        ("guide/missing.svg", True),
    ],
)
def test_links(tmp_path, link, is_broken):
    texts = {"a.html": f'<h1 id="top"><a href="{link}">', "guide/b.html": '<h1 id="a-place"><img src="b.svg">'}
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "b.svg").write_text("<svg/>")
    expected = [f"a.html: {link}"] if is_broken else []
    assert broken_links(tmp_path, pages_of(tmp_path, texts)) == expected


def test_a_name_has_a_page_with_its_docstring(tmp_path, monkeypatch):
    names = ["get_strategy", "has_strategy", "get_replica_context", "CollectiveCommunication"]
    monkeypatch.setattr(site_check, "sections", lambda: {"Strategies": names})
    texts = {
        "get_strategy": "<p>Return the <b>strategy</b> whose scope or run the caller is in; outside all, the\n"
        "pass-through strategy.</p>",
        "has_strategy": "<p>Another text.</p>",
        "CollectiveCommunication": "<p>alias of CommunicationImplementation</p>",
    }
    folder = tmp_path / "docs" / "reference" / "api"
    pages = pages_of(folder, {f"hpcdist.{name}.html": text for name, text in texts.items()})
    assert names_without_pages(tmp_path, pages) == ["has_strategy", "get_replica_context"]


def test_a_name_without_a_docstring_is_missing(tmp_path, monkeypatch):
    def get_undescribed():
        pass

    monkeypatch.setattr(site_check.hpcdist, "get_undescribed", get_undescribed, raising=False)
    monkeypatch.setattr(site_check, "sections", lambda: {"Strategies": ["get_undescribed"]})
    texts = {"docs/reference/api/hpcdist.get_undescribed.html": "<p>hpcdist.get_undescribed()</p>"}
    assert names_without_pages(tmp_path, pages_of(tmp_path, texts)) == ["get_undescribed"]
