"""Figures of an audit as people read them."""

import pytest

from hfpar.audit import wording
from hfpar.audit.results import Estimate


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
        (0.9994, "99.9 %"),
        (0.9996, "> 99.9 %"),
        (7472 / 7473, "> 99.9 %"),
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
        (2e-95, "2e-95"),
        (6e-96, "< 1e-95"),
        (0.0, "< 1e-95"),
        # Rounded to the usual two digits, or one, these would be on the other side of 0.05 or 0.001.
        (0.05028, "0.0503"),
        (0.05, "0.05"),
        (0.04996, "0.05"),
        (0.0500004, "0.0500004"),
        (0.001015, "0.00102"),
        (0.00099996, "1e-3"),
        (0.05000000000000001, "0.05000000000000001"),
    ],
)
def test_p_values(value, text):
    assert wording.p_value(value) == text
    if value is not None and not text.startswith("<"):
        assert all((float(text) <= level) == (value <= level) for level in (0.05, 0.001))


@pytest.mark.parametrize(
    ("value", "level", "text"),
    [
        (0.01003, 0.01, "0.01003"),
        (0.01, 0.01, "0.01"),
        (0.0123, 0.01, "0.012"),
        (1.3e-5, 1e-5, "1.3e-5"),
        (1.004e-5, 1e-5, "1.004e-5"),
        (0.9e-5, 1e-5, "9e-6"),
        (2.54e-4, 2.55e-4, "2.5e-4"),
    ],
)
def test_p_values_stay_on_their_side_of_any_level(value, level, text):
    shown = wording.p_value(value, level)
    assert (float(shown) <= level) == (value <= level)
    assert shown == text


def test_p_values_in_sentences():
    assert wording.p_equals(0.0312) == "p = 0.031"
    assert wording.p_equals(0.01003, 0.01) == "p = 0.01003"
    assert wording.p_equals(3e-98) == "p < 1e-95"
    assert wording.p_equals(None) == "–"


@pytest.mark.parametrize(
    ("value", "hits", "total", "text"),
    [
        (0.484, 10, 420, "10/420, reweighted 48.4 %"),
        (0.25, 2500, 10_000, "25.0 % (2,500/10,000)"),
        (0.2502, 2500, 10_000, "25.0 % (2,500/10,000)"),
        (0.26, 2500, 10_000, "2,500/10,000, reweighted 26.0 %"),
        (0.0, 0, 220, "0 % (0/220)"),
        (0.5, None, 220, "50.0 %"),
        (None, 0, 0, "–"),
    ],
)
def test_a_control_s_share_says_where_its_counts_do_not_give_it(value, hits, total, text):
    assert wording.control_share(Estimate(value, None, None, total, hits)) == text
    assert wording.control_share(None) == "–"


def test_differences_and_intervals():
    assert wording.points(0.124) == "+12.4 pp"
    assert wording.points(-0.124) == "−12.4 pp"
    assert wording.points(-0.0001) == "0.0 pp"
    assert wording.interval(-0.0001, 0.25) == "[0.0, 25.0]"
    assert wording.interval(None, 0.25) == ""
