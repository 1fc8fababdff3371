"""One-line summaries of errors, even if the message is empty."""

import pytest

from verl_rhyme.observability.errors import first_line, last_line


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("gone", "gone", "gone"),
        ("\nwhat\nTraceback\nwhy\n", "what", "why"),
        ("", "OSError", "OSError"),
        ("\n", "OSError", "OSError"),
    ],
)
def test_an_error_in_one_line(text, first, last):
    assert (first_line(OSError(text)), last_line(OSError(text))) == (first, last)
