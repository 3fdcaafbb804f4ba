"""Whole numbers in texts that people and launchers write: variables, options, roles."""

#: A longer text is no number of ranks, tasks or cores; Python refuses to read thousands of digits.
_MAX_DIGITS = 9


def whole_number(text: str) -> int | None:
    """Return the whole number, from 0, in a text of at most 9 digits; None for any other text.

    >>> whole_number("12"), whole_number("-1"), whole_number("1" * 10), whole_number("")
    (12, None, None, None)
    """
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        return None
    return int(text)
