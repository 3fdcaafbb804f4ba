"""Printing. Other users may write to run folders, so no text from there may steer the reader's terminal."""

import unicodedata
from typing import Any

import click

#: Control and format characters (terminal escapes, the direction of text), and halves of characters.
_STEERING = ("Cc", "Cf", "Cs")


def echo(text: str, **options: Any) -> None:
    """Print a text by `click.echo`. Characters that would steer a terminal become escapes such as \\x1b."""
    click.echo(printable(text), **options)


def printable(text: str) -> str:
    """Return a text with escapes for characters that would steer a terminal; ends of lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    """Return a character, or its escape if it would steer a terminal."""
    if character in "\n\t" or unicodedata.category(character) not in _STEERING:
        return character
    return character.encode("unicode_escape").decode()
