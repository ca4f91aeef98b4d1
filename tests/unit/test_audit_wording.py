"""Figures of an audit as people read them."""

import pytest

from hfpar.audit import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.1234, "12.3 %"),
        (0.0004, "0.04 %"),
        (0.00001, "< 0.01 %"),
        (0.00994, "0.99 %"),
        (0.0312, "3.1 %"),
        (0.9999, "100.0 %"),
    ],
)
def test_shares(value, text):
    assert wording.percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (1.0, "1"),
        (0.5, "0.5"),
        (0.0312, "0.031"),
        (0.001, "0.001"),
        (4.2e-7, "4e-7"),
        (1e-300, "< 1e-99"),
        (0.0, "< 1e-99"),
    ],
)
def test_p_values(value, text):
    assert wording.p_value(value) == text


def test_differences_and_intervals():
    assert wording.points(0.124) == "+12.4 pp"
    assert wording.points(-0.124) == "−12.4 pp"
    assert wording.points(-0.0001) == "0.0 pp"
    assert wording.interval(-0.0001, 0.25) == "[0.0, 25.0]"
    assert wording.interval(None, 0.25) == ""
