"""The texts of the errors that hpcdist raises, as its source has them; a test reads what each expects."""

import ast
from pathlib import Path

#: Stands for a value in a text.
VALUE = "<value>"


def texts_of(path: Path, names: set[str]) -> list[tuple[int, str]]:
    """Return (line, text) of the calls of exception classes in a file whose first argument is a text.

    Args:
        path: file of the package.
        names: names of the exception classes.
    """
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
            text = text_of(node.args[0])
            if text is not None:
                texts.append((node.lineno, text))
    return sorted(texts)


def text_of(node: ast.expr) -> str | None:
    """Return a text with VALUE in place of what is formatted in; None for an expression that is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left_text = text_of(node.left)
        right = text_of(node.right)
        if left_text is None and right is None:
            return None
        return (left_text or VALUE) + (right or VALUE)
    return None
